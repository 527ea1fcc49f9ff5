package iam

import "github.com/gpuaas/gpuaas/hub/internal/principal"

// Permission is a key of the contract.
type Permission = string

// The permission keys.
const (
	InstanceRead     Permission = "apps.instance.read"
	InstanceCreate   Permission = "apps.instance.create"
	InstanceUpgrade  Permission = "apps.instance.upgrade"
	InstanceRollback Permission = "apps.instance.rollback"
	InstanceStop     Permission = "apps.instance.stop"
	InstanceStart    Permission = "apps.instance.start"
	InstanceDelete   Permission = "apps.instance.delete"
	InstanceLogs     Permission = "apps.instance.logs"
	InstanceExec     Permission = "apps.instance.exec"
	// InstanceConnect reaches the ports of a running app.
	InstanceConnect Permission = "apps.instance.connect"
	// InstanceMembers adds, removes and recovers members of an app that an external worker operates.
	InstanceMembers Permission = "apps.instance.members"
	// InstanceWork is to work off the tasks of an app as its external worker.
	InstanceWork Permission = "apps.instance.work"

	// AttachmentCreate attaches a project to an app instance that another project of the org shares; AttachmentDelete
	// ends that, for either project.
	AttachmentCreate Permission = "apps.attachment.create"
	AttachmentDelete Permission = "apps.attachment.delete"
	AttachmentRead   Permission = "apps.attachment.read"

	// ArtifactPublish asks for a publish intent and registers what was pushed; ArtifactManage verifies, promotes,
	// deprecates, retires and revokes.
	ArtifactRead    Permission = "apps.artifact.read"
	ArtifactPublish Permission = "apps.artifact.publish"
	ArtifactManage  Permission = "apps.artifact.manage"

	// EnvironmentManage is to set a project's package index and to remove environments.
	EnvironmentRead   Permission = "apps.environment.read"
	EnvironmentManage Permission = "apps.environment.manage"

	// SecretManage issues, rotates and revokes secrets of a project. Nothing lets anybody read one.
	SecretRead   Permission = "apps.secret.read"
	SecretManage Permission = "apps.secret.manage"

	EntitlementRead  Permission = "apps.entitlement.read"
	EntitlementWrite Permission = "apps.entitlement.write"

	// CatalogManage registers manifests, publishes and deprecates versions.
	CatalogRead   Permission = "apps.catalog.read"
	CatalogManage Permission = "apps.catalog.manage"

	AllocationRead    Permission = "capacity.allocation.read"
	AllocationCreate  Permission = "capacity.allocation.create"
	AllocationRelease Permission = "capacity.allocation.release"

	// SSHKeyManage sets the operators' SSH keys of an allocation, AppSSHKeyManage those of its apps.
	SSHKeyManage    Permission = "capacity.ssh_key.manage"
	AppSSHKeyManage Permission = "apps.ssh_key.manage"

	VolumeRead   Permission = "capacity.volume.read"
	VolumeCreate Permission = "capacity.volume.create"
	// VolumeSnapshot takes and deletes snapshots; VolumeRestore replaces a volume's content by one.
	VolumeSnapshot Permission = "capacity.volume.snapshot"
	VolumeRestore  Permission = "capacity.volume.restore"
	VolumeDelete   Permission = "capacity.volume.delete"

	SKURead  Permission = "capacity.sku.read"
	SKUWrite Permission = "capacity.sku.write"

	UsageRead   Permission = "billing.usage.read"
	LedgerRead  Permission = "billing.ledger.read"
	WalletRead  Permission = "billing.wallet.read"
	PriceRead   Permission = "billing.price.read"
	PriceWrite  Permission = "billing.price.write"
	CreditGrant Permission = "billing.credit.grant"

	// AccessCredentialManage makes, rotates and revokes key pairs of a project.
	AccessCredentialRead   Permission = "iam.access_credential.read"
	AccessCredentialManage Permission = "iam.access_credential.manage"

	OrgRead       Permission = "iam.org.read"
	OrgCreate     Permission = "iam.org.create"
	QuotaRead     Permission = "iam.quota.read"
	QuotaWrite    Permission = "iam.quota.write"
	ProjectRead   Permission = "iam.project.read"
	ProjectCreate Permission = "iam.project.create"
	UserRead      Permission = "iam.user.read"
	UserWrite     Permission = "iam.user.write"
	// UserManage disables and removes users of an org and revokes their tokens; RoleWrite gives and takes roles.
	UserManage          Permission = "iam.user.manage"
	RoleRead            Permission = "iam.role.read"
	RoleWrite           Permission = "iam.role.write"
	ServiceAccountRead  Permission = "iam.service_account.read"
	ServiceAccountWrite Permission = "iam.service_account.write"
	WebhookRead         Permission = "iam.webhook.read"
	WebhookWrite        Permission = "iam.webhook.write"

	NodeRead       Permission = "fleet.node.read"
	NodeWrite      Permission = "fleet.node.write"
	JoinTokenRead  Permission = "fleet.join_token.read"
	JoinTokenWrite Permission = "fleet.join_token.write"
	PublisherRead  Permission = "fleet.publisher.read"
	PublisherWrite Permission = "fleet.publisher.write"

	AuditRead   Permission = "audit.read"
	AuditExport Permission = "audit.export"
)

// Role is a named set of permissions; policies.cedar says which.
type Role string

// The roles. PlatformAdmin is a property of a user, not a role that an org can give.
const (
	OrgAdmin     Role = "org_admin"
	OrgMember    Role = "org_member"
	OrgBilling   Role = "org_billing"
	ProjectAdmin Role = "project_admin"
	AppOperator  Role = "app_operator"
	AppPublisher Role = "app_publisher"
	Viewer       Role = "viewer"
)

// roles are all roles; each has a policy of its name.
func roles() []Role {
	return []Role{OrgAdmin, OrgMember, OrgBilling, AppPublisher, ProjectAdmin, AppOperator, Viewer}
}

// Permissions lists, sorted, what the role may; nothing for a role that does not exist.
func (r Role) Permissions() []Permission {
	return Principal{Type: principal.User, ID: "any", OrgID: "any", Bindings: []Binding{{Role: r}}}.Permissions()
}

// ForUser reports whether an org's user may hold the role in the whole org.
func (r Role) ForUser() bool {
	return r == OrgAdmin || r == OrgMember || r == OrgBilling || r == AppPublisher
}

// ForProject reports whether a user of the org may hold the role in one project.
func (r Role) ForProject() bool { return r == ProjectAdmin || r == AppOperator || r == Viewer }

// ForServiceAccount reports whether a service account may hold the role: none of these can change who may do what.
func (r Role) ForServiceAccount() bool { return r == AppOperator || r == AppPublisher || r == Viewer }

// forPeople reports whether only people may have the permission: it changes who may do what.
func forPeople(p Permission) bool {
	return p == EntitlementWrite || p == RoleWrite || p == ServiceAccountWrite || p == UserManage
}

// Permissions lists all permissions, sorted.
func Permissions() []Permission {
	return []Permission{
		ArtifactManage, ArtifactPublish, ArtifactRead, AttachmentCreate, AttachmentDelete, AttachmentRead,
		CatalogManage, CatalogRead, EntitlementRead,
		EntitlementWrite, EnvironmentManage, EnvironmentRead, InstanceConnect, InstanceCreate,
		InstanceDelete, InstanceExec, InstanceLogs, InstanceMembers, InstanceRead, InstanceRollback, InstanceStart,
		InstanceStop, InstanceUpgrade, InstanceWork, SecretManage, SecretRead, AppSSHKeyManage, AuditExport, AuditRead,
		CreditGrant, LedgerRead, PriceRead, PriceWrite,
		UsageRead, WalletRead, AllocationCreate, AllocationRead, AllocationRelease, SKURead, SKUWrite, SSHKeyManage,
		VolumeCreate, VolumeDelete, VolumeRead, VolumeRestore, VolumeSnapshot, JoinTokenRead,
		JoinTokenWrite, NodeRead, NodeWrite, PublisherRead, PublisherWrite,
		AccessCredentialManage, AccessCredentialRead, OrgCreate, OrgRead,
		ProjectCreate, ProjectRead, QuotaRead, QuotaWrite, RoleRead, RoleWrite, ServiceAccountRead,
		ServiceAccountWrite, UserManage, UserRead, UserWrite, WebhookRead, WebhookWrite,
	}
}
