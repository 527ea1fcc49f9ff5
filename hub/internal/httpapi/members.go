package httpapi

import (
	"context"

	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/protocol"
)

// AddAppInstanceMember adds a member to an app of an external worker.
func (s *Server) AddAppInstanceMember(ctx context.Context,
	r AddAppInstanceMemberRequestObject,
) (AddAppInstanceMemberResponseObject, error) {
	view, err := commandedView(s.Commands.AddMember(ctx, metaFrom(ctx), r.ProjectID, r.AppInstanceID,
		r.Body.AllocationID, string(r.Body.Role)))
	return AddAppInstanceMember202JSONResponse(view), err
}

// RemoveAppInstanceMember takes a member out of an app of an external worker.
func (s *Server) RemoveAppInstanceMember(ctx context.Context,
	r RemoveAppInstanceMemberRequestObject,
) (RemoveAppInstanceMemberResponseObject, error) {
	view, err := commandedView(s.Commands.RemoveMember(ctx, metaFrom(ctx), r.ProjectID, r.AppInstanceID, r.MemberID))
	return RemoveAppInstanceMember202JSONResponse(view), err
}

// RecoverAppInstanceMember recovers a member.
func (s *Server) RecoverAppInstanceMember(ctx context.Context,
	r RecoverAppInstanceMemberRequestObject,
) (RecoverAppInstanceMemberResponseObject, error) {
	view, err := commandedView(s.Commands.RecoverMember(ctx, metaFrom(ctx), r.ProjectID, r.AppInstanceID, r.MemberID))
	return RecoverAppInstanceMember202JSONResponse(view), err
}

// ReportAppInstanceMember records what an external worker says of a member.
func (s *Server) ReportAppInstanceMember(ctx context.Context,
	r ReportAppInstanceMemberRequestObject,
) (ReportAppInstanceMemberResponseObject, error) {
	// The contract's check has refused other texts.
	var status protocol.WorkloadStatus_Status
	if err := status.UnmarshalText([]byte(r.Body.Status)); err != nil {
		return nil, err
	}
	view, err := commandedView(s.Commands.ReportMember(ctx, metaFrom(ctx), r.ProjectID, r.AppInstanceID,
		instance.MemberReport{MemberID: r.MemberID, Status: status, Detail: r.Body.Detail}, string(r.Body.Reason)))
	return ReportAppInstanceMember200JSONResponse(view), err
}
