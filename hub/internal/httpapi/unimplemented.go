package httpapi

import (
	"context"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// Unimplemented answers every operation that Server has no method for yet. It goes when the last one is written.
type Unimplemented struct{}

func notYet() error {
	return fault.New(fault.Unavailable, "not_implemented", "This hub does not have this operation yet.", nil)
}

func (Unimplemented) DeprecateAppVersion(context.Context, DeprecateAppVersionRequestObject) (DeprecateAppVersionResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) PublishAppVersion(context.Context, PublishAppVersionRequestObject) (PublishAppVersionResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) RegisterManifest(context.Context, RegisterManifestRequestObject) (RegisterManifestResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) GrantCredit(context.Context, GrantCreditRequestObject) (GrantCreditResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) ListJoinTokens(context.Context, ListJoinTokensRequestObject) (ListJoinTokensResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) CreateJoinToken(context.Context, CreateJoinTokenRequestObject) (CreateJoinTokenResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) ListNodes(context.Context, ListNodesRequestObject) (ListNodesResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) GetNode(context.Context, GetNodeRequestObject) (GetNodeResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) BanNode(context.Context, BanNodeRequestObject) (BanNodeResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) DrainNode(context.Context, DrainNodeRequestObject) (DrainNodeResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) ListPrices(context.Context, ListPricesRequestObject) (ListPricesResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) CreatePrice(context.Context, CreatePriceRequestObject) (CreatePriceResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) ListPublishers(context.Context, ListPublishersRequestObject) (ListPublishersResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) RegisterPublisher(context.Context, RegisterPublisherRequestObject) (RegisterPublisherResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) ListUsers(context.Context, ListUsersRequestObject) (ListUsersResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) CreateUser(context.Context, CreateUserRequestObject) (CreateUserResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) CreateUserToken(context.Context, CreateUserTokenRequestObject) (CreateUserTokenResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) ListApps(context.Context, ListAppsRequestObject) (ListAppsResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) ListAppVersions(context.Context, ListAppVersionsRequestObject) (ListAppVersionsResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) GetRegistry(context.Context, GetRegistryRequestObject) (GetRegistryResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) MintServiceAccountToken(context.Context, MintServiceAccountTokenRequestObject) (MintServiceAccountTokenResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) Whoami(context.Context, WhoamiRequestObject) (WhoamiResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) ListLedger(context.Context, ListLedgerRequestObject) (ListLedgerResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) ListUsage(context.Context, ListUsageRequestObject) (ListUsageResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) GetWallet(context.Context, GetWalletRequestObject) (GetWalletResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) GetHealth(context.Context, GetHealthRequestObject) (GetHealthResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) EnrollNode(context.Context, EnrollNodeRequestObject) (EnrollNodeResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) RenewNode(context.Context, RenewNodeRequestObject) (RenewNodeResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) GetOpenAPI(context.Context, GetOpenAPIRequestObject) (GetOpenAPIResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) ListOrgs(context.Context, ListOrgsRequestObject) (ListOrgsResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) CreateOrg(context.Context, CreateOrgRequestObject) (CreateOrgResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) ListProjects(context.Context, ListProjectsRequestObject) (ListProjectsResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) CreateProject(context.Context, CreateProjectRequestObject) (CreateProjectResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) GetProject(context.Context, GetProjectRequestObject) (GetProjectResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) ListArtifacts(context.Context, ListArtifactsRequestObject) (ListArtifactsResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) RegisterArtifact(context.Context, RegisterArtifactRequestObject) (RegisterArtifactResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) CreatePublishIntent(context.Context, CreatePublishIntentRequestObject) (CreatePublishIntentResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) ListEntitlements(context.Context, ListEntitlementsRequestObject) (ListEntitlementsResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) GetEntitlement(context.Context, GetEntitlementRequestObject) (GetEntitlementResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) PutEntitlement(context.Context, PutEntitlementRequestObject) (PutEntitlementResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) ListServiceAccounts(context.Context, ListServiceAccountsRequestObject) (ListServiceAccountsResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) CreateServiceAccount(context.Context, CreateServiceAccountRequestObject) (CreateServiceAccountResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) GetReadiness(context.Context, GetReadinessRequestObject) (GetReadinessResponseObject, error) {
	return nil, notYet()
}

func (Unimplemented) GetTrustBundle(context.Context, GetTrustBundleRequestObject) (GetTrustBundleResponseObject, error) {
	return nil, notYet()
}
