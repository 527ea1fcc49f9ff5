package httpapi

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/db"
)

// GetRegistry says where images are pushed and pulled.
func (s *Server) GetRegistry(ctx context.Context, _ GetRegistryRequestObject) (GetRegistryResponseObject, error) {
	host, err := s.Queries.RegistryHost(principalOf(ctx))
	if err != nil {
		return nil, err
	}
	return GetRegistry200JSONResponse(Registry{
		RegistryHost: host, NamespaceMode: RegistryNamespaceModeOrgOwned, DigestOnly: true,
		ProjectPrivateRepositories: false,
	}), nil
}

// CreatePublishIntent says where to push and with which credentials.
func (s *Server) CreatePublishIntent(ctx context.Context,
	r CreatePublishIntentRequestObject,
) (CreatePublishIntentResponseObject, error) {
	made, err := s.Commands.CreatePublishIntent(ctx, metaFrom(ctx), artifact.Intent{
		ProjectID: r.ProjectID, AppSlug: r.Body.AppSlug, AppVersion: r.Body.AppVersion, ArtifactName: r.Body.ArtifactName,
		ArtifactKind: string(r.Body.ArtifactKind), Channel: string(r.Body.Channel),
	})
	if err != nil {
		return nil, err
	}
	return CreatePublishIntent201JSONResponse(PublishIntent{
		IntentID: made.Intent.ID, Repository: made.Intent.Repository, Tag: made.Intent.Tag,
		RegistryHost: s.RegistryHost,
		Credentials: RegistryCredentials{
			Username: made.Username, Password: made.Password,
			ExpiresAt: made.Intent.ExpiresAt,
		},
		SignatureRequired: true, SignatureScheme: PublishIntentSignatureSchemeCosignSimpleSigningEd25519,
		SigningKeyID: made.SigningKeyID,
	}), nil
}

// RegisterArtifact takes note of a pushed digest and checks its signature.
func (s *Server) RegisterArtifact(ctx context.Context,
	r RegisterArtifactRequestObject,
) (RegisterArtifactResponseObject, error) {
	a, err := s.Commands.RegisterArtifact(ctx, metaFrom(ctx), artifact.Artifact{
		ProjectID: r.ProjectID, AppSlug: r.Body.AppSlug, AppVersion: r.Body.AppVersion, ArtifactName: r.Body.ArtifactName,
		ArtifactKind: string(r.Body.ArtifactKind), Digest: r.Body.Digest, Repository: r.Body.Repository,
		MediaType: r.Body.MediaType,
		Channel:   string(r.Body.Channel),
	})
	return RegisterArtifact201JSONResponse(artifactView(a)), err
}

// ListArtifacts lists a project's artifacts.
func (s *Server) ListArtifacts(ctx context.Context, r ListArtifactsRequestObject) (ListArtifactsResponseObject, error) {
	items, next, err := page(r.Params.Cursor, r.Params.Limit, func(p db.Page) ([]artifact.Artifact, error) {
		return s.Queries.Artifacts(ctx, principalOf(ctx), artifact.Filter{
			ProjectID: r.ProjectID, AppSlug: r.Params.AppSlug, After: p.After, Limit: p.Limit,
		})
	}, func(v artifact.Artifact) string { return v.ID })
	return ListArtifacts200JSONResponse{Items: views(items, artifactView), NextCursor: next}, err
}

// GetArtifact reads one of them.
func (s *Server) GetArtifact(ctx context.Context, r GetArtifactRequestObject) (GetArtifactResponseObject, error) {
	a, err := s.Queries.Artifact(ctx, principalOf(ctx), r.ProjectID, r.ArtifactID,
		watchOf(r.Params.After, r.Params.Wait))
	return GetArtifact200JSONResponse(artifactView(a)), err
}

// VerifyArtifact reads its signatures once more.
func (s *Server) VerifyArtifact(ctx context.Context,
	r VerifyArtifactRequestObject,
) (VerifyArtifactResponseObject, error) {
	a, err := s.Commands.VerifyArtifact(ctx, metaFrom(ctx), r.ProjectID, r.ArtifactID)
	return VerifyArtifact200JSONResponse(artifactView(a)), err
}

// PromoteArtifact moves it to a later channel.
func (s *Server) PromoteArtifact(ctx context.Context,
	r PromoteArtifactRequestObject,
) (PromoteArtifactResponseObject, error) {
	a, err := s.Commands.PromoteArtifact(ctx, metaFrom(ctx), r.ProjectID, r.ArtifactID, string(r.Body.Channel),
		r.Body.Reason)
	return PromoteArtifact200JSONResponse(artifactView(a)), err
}

// DeprecateArtifact closes it for further versions.
func (s *Server) DeprecateArtifact(ctx context.Context,
	r DeprecateArtifactRequestObject,
) (DeprecateArtifactResponseObject, error) {
	a, err := s.Commands.DeprecateArtifact(ctx, metaFrom(ctx), r.ProjectID, r.ArtifactID, r.Body.Reason)
	return DeprecateArtifact200JSONResponse(artifactView(a)), err
}

// RetireArtifact ends one that nothing uses.
func (s *Server) RetireArtifact(ctx context.Context,
	r RetireArtifactRequestObject,
) (RetireArtifactResponseObject, error) {
	a, err := s.Commands.RetireArtifact(ctx, metaFrom(ctx), r.ProjectID, r.ArtifactID, r.Body.Reason)
	return RetireArtifact200JSONResponse(artifactView(a)), err
}

// RevokeArtifact ends the trust in its content.
func (s *Server) RevokeArtifact(ctx context.Context,
	r RevokeArtifactRequestObject,
) (RevokeArtifactResponseObject, error) {
	a, err := s.Commands.RevokeArtifact(ctx, metaFrom(ctx), r.ProjectID, r.ArtifactID, r.Body.Reason)
	return RevokeArtifact200JSONResponse(artifactView(a)), err
}

func artifactView(a artifact.Artifact) Artifact {
	out := Artifact{
		ID: a.ID, AppSlug: a.AppSlug, AppVersion: a.AppVersion, ArtifactName: a.ArtifactName,
		ArtifactKind: ArtifactKind(a.ArtifactKind),
		Repository:   a.Repository, Digest: a.Digest, MediaType: a.MediaType, SizeBytes: a.SizeBytes, Platforms: a.Platforms,
		Status: ArtifactStatus(a.Status), TrustState: ArtifactTrustState(a.TrustState), Channel: Channel(a.Channel),
		Evidence: []Evidence{}, ResourceVersion: a.ResourceVersion, CreatedAt: a.CreatedAt,
	}
	if out.Platforms == nil {
		out.Platforms = []string{}
	}
	for _, e := range a.Evidence {
		out.Evidence = append(out.Evidence, Evidence{
			Kind: EvidenceKind(e.Kind), KeyID: e.KeyID, Digest: e.Digest,
			VerifiedAt: e.VerifiedAt,
		})
	}
	return out
}
