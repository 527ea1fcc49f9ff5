package httpapi

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/protocol"
)

// ListEnvironments lists the environments that nodes keep for a project.
func (s *Server) ListEnvironments(ctx context.Context,
	r ListEnvironmentsRequestObject,
) (ListEnvironmentsResponseObject, error) {
	items, next, err := page(r.Params.Cursor, r.Params.Limit, func(p db.Page) ([]capacity.Environment, error) {
		return s.Queries.Environments(ctx, principalOf(ctx), r.ProjectID, p)
	}, capacity.Environment.Cursor)
	return ListEnvironments200JSONResponse{Items: views(items, environmentOnNodeView), NextCursor: next}, err
}

// DeleteEnvironment removes an unused environment from its node. The node decides whether it is unused.
func (s *Server) DeleteEnvironment(ctx context.Context,
	r DeleteEnvironmentRequestObject,
) (DeleteEnvironmentResponseObject, error) {
	_, project, err := s.Queries.EnvironmentToRemove(ctx, principalOf(ctx), r.ProjectID, r.NodeID, r.Digest)
	if err != nil {
		return nil, err
	}
	if err := s.Commands.MeetPrecondition(ctx); err != nil {
		return nil, err
	}
	err = s.NodeStreams.RemoveEnvironment(ctx, r.NodeID, project.OrgID, &protocol.RemoveEnvironmentRequest{
		ProjectId: project.ID, Digest: r.Digest,
	})
	if err != nil {
		return nil, err
	}
	return DeleteEnvironment204Response{}, s.Commands.ForgetEnvironment(ctx, metaFrom(ctx), project.ID, r.NodeID, r.Digest)
}

func environmentOnNodeView(e capacity.Environment) Environment {
	out := Environment{
		Digest:       e.GetDigest(),
		NodeID:       e.NodeID,
		ImageRef:     e.GetImage(),
		Requirements: append([]string{}, e.GetRequirements()...),
		SizeBytes:    int64(e.GetSizeBytes()),
		UsedBy:       append([]string{}, e.GetUsedBy()...),
	}
	if e.GetBuiltAt() != nil {
		out.BuiltAt = e.GetBuiltAt().AsTime()
	}
	if e.GetUsedAt() != nil {
		out.LastUsedAt = e.GetUsedAt().AsTime()
	}
	return out
}

// GetPackageIndex gives where the environments of a project get their packages from.
func (s *Server) GetPackageIndex(ctx context.Context,
	r GetPackageIndexRequestObject,
) (GetPackageIndexResponseObject, error) {
	i, err := s.Queries.PackageIndex(ctx, principalOf(ctx), r.ProjectID)
	return GetPackageIndex200JSONResponse(packageIndexView(i)), err
}

// PutPackageIndex sets where the environments of a project get their packages from.
func (s *Server) PutPackageIndex(ctx context.Context,
	r PutPackageIndexRequestObject,
) (PutPackageIndexResponseObject, error) {
	i, err := s.Commands.PutPackageIndex(ctx, metaFrom(ctx), r.ProjectID, r.Body.URL, r.Body.Username, r.Body.Password,
		r.Body.CaPem)
	return PutPackageIndex200JSONResponse(packageIndexView(i)), err
}

// DeletePackageIndex leaves the environments of a project to pip's own index.
func (s *Server) DeletePackageIndex(ctx context.Context,
	r DeletePackageIndexRequestObject,
) (DeletePackageIndexResponseObject, error) {
	_, err := s.Commands.PutPackageIndex(ctx, metaFrom(ctx), r.ProjectID, "", "", "", "")
	return DeletePackageIndex204Response{}, err
}

func packageIndexView(i iam.PackageIndex) PackageIndex {
	return PackageIndex{URL: i.URL, Username: i.Username, OwnCa: i.OwnCA, UpdatedAt: i.UpdatedAt}
}
