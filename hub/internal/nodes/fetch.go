package nodes

import (
	"context"

	"github.com/gpuaas/gpuaas/protocol"
)

// Fetch answers a node's request for a part of its state, a trust bundle or a registry credential.
func (svc *Service) Fetch(ctx context.Context, nodeID string, request *protocol.FetchRequest,
) (*protocol.FetchResponse, error) {
	switch r := request.GetRequest().(type) {
	case *protocol.FetchRequest_PartSha256:
		part, err := svc.Dispatcher.Part(ctx, nodeID, r.PartSha256)
		return &protocol.FetchResponse{Part: part}, err
	case *protocol.FetchRequest_Bundle:
		return &protocol.FetchResponse{Bundle: svc.Keys.BundleAfter(request.GetBundleVersion()).Envelope()}, nil
	case *protocol.FetchRequest_PullCredential:
		repository := r.PullCredential.GetRepository()
		assigned, err := svc.Dispatcher.MayPull(ctx, nodeID, repository)
		if err != nil {
			return nil, err
		}
		if !assigned {
			return nil, protocol.Refuse(protocol.Nack_NOT_ASSIGNED, "no workload of this node needs the repository")
		}
		credential, err := svc.Registry.NodeCredential(nodeID, repository, svc.Now())
		return &protocol.FetchResponse{PullCredential: credential}, err
	default:
		return nil, protocol.Refuse(protocol.Nack_MALFORMED, "the request is unknown")
	}
}
