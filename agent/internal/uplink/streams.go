package uplink

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/hubsession"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/agent/spool"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/loop"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
	"github.com/gpuaas/gpuaas/protocol"
	"github.com/gpuaas/gpuaas/protocol/link"
)

// upload sends the sealed segments in order and takes one acknowledgement for each. After a reconnect it starts from
// the first segment that the hub has not posted; the hub bills each once.
func (s *session) upload(ctx context.Context) error {
	stream, err := s.conn.Open(ctx, &protocol.StreamHeader{Kind: protocol.StreamHeader_KIND_USAGE})
	if err != nil {
		return err
	}
	defer stream.Abort()
	u := hubsession.NewUpload(s.u.store.Spool().Marks.Posted)
	for {
		if err := s.sendSegments(stream, &u); err != nil {
			return err
		}
		if !u.Waiting() {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-s.conn.Done():
				return s.conn.Err()
			case <-s.u.sealed:
			}
			continue
		}
		refused, err := s.receiveAck(stream)
		if err != nil {
			return err
		}
		stopped := u.Acknowledged(refused)
		if stopped == 0 {
			continue
		}
		if err := s.usageRefused(ctx, stopped); err != nil {
			return err
		}
		u.Restart(s.u.store.Spool().Marks.Posted)
	}
}

// sendSegments sends the sealed segments that the window takes.
func (s *session) sendSegments(stream *link.Stream, u *hubsession.Upload) error {
	for number, ok := u.Next(); ok; number, ok = u.Next() {
		env, err := s.u.store.Segment(number)
		if errors.Is(err, state.ErrUnreadable) {
			return s.renew(err, err)
		}
		if env == nil || err != nil {
			return err
		}
		if err := sendWithin(stream, &protocol.UsageUpload{Segment: env}); err != nil {
			return err
		}
		failpoint.Hit("agent/upload/sent")
		u.Sent()
	}
	return nil
}

// usageRefused waits before the refused segments are sent again. It fails where the store took a new incarnation.
func (s *session) usageRefused(ctx context.Context, reason protocol.Nack_Reason) error {
	if hubsession.Broken(reason) {
		return s.renew(spool.ErrOtherStore, fmt.Errorf("usage segment refused: %s", reason.Text()))
	}
	wait := hubsession.UsageRetry(reason, s.u.cfg.UsageRetry)
	s.u.log.WarnContext(ctx, "usage segment refused", slog.String("reason", reason.Text()),
		slog.Uint64("after_segment", s.u.store.Spool().Marks.Posted), slog.String("retry_in", wait.String()))
	if !loop.Pause(ctx, wait) {
		return ctx.Err()
	}
	return nil
}

// renew gives the store a new incarnation and ends the session with an error after which the node dials with the usual
// pause.
func (s *session) renew(why, end error) error {
	if err := hubsession.Renew(sessionStore{s.u}, why); !errors.Is(err, hubsession.ErrNewIncarnation) {
		return err
	}
	return end
}

func (s *session) receiveAck(stream *link.Stream) (refused protocol.Nack_Reason, err error) {
	if err := stream.SetReadDeadline(time.Now().Add(hubsession.AckTimeout)); err != nil {
		return 0, err
	}
	ack := &protocol.UsageAck{}
	if err := stream.Receive(ack, protocol.MaxHeaderBytes); err != nil {
		return 0, fmt.Errorf("usage: %w", err)
	}
	failpoint.Hit("agent/upload/answered")
	if err := s.u.store.AcknowledgeUsage(spool.HubProgress{
		Incarnation: ack.GetIncarnation(), Posted: ack.GetPostedSegment(), Archived: ack.GetArchivedSegment(),
		PostedSHA256: ack.GetPostedSha256(),
	}); err != nil {
		return 0, err
	}
	failpoint.Hit("agent/upload/acknowledged")
	return ack.GetNackReason(), nil
}

// sendWithin sends a message within sendTimeout.
func sendWithin(stream *link.Stream, m proto.Message) error {
	if err := stream.SetWriteDeadline(time.Now().Add(sendTimeout)); err != nil {
		return err
	}
	return stream.Send(m)
}

// PullCredential asks the hub to let this node pull from one repository.
func (u *Uplink) PullCredential(ctx context.Context, repository string) (*protocol.PullCredential, error) {
	answer, err := u.fetch(ctx, &protocol.FetchRequest{
		Request: &protocol.FetchRequest_PullCredential{PullCredential: &protocol.PullCredentialRequest{
			Repository: repository,
		}},
	})
	if err != nil {
		return nil, err
	}
	if answer.GetPullCredential() == nil {
		return nil, fault.New(fault.Unavailable, codePullCredentialMissing, "The hub gives no credential for the image.", nil)
	}
	return answer.GetPullCredential(), nil
}

// Part fetches one document of the accepted state.
func (u *Uplink) Part(ctx context.Context, sha256 [32]byte) ([]byte, error) {
	answer, err := u.fetch(ctx, &protocol.FetchRequest{Request: &protocol.FetchRequest_PartSha256{PartSha256: sha256[:]}})
	if err != nil {
		return nil, err
	}
	return answer.GetPart(), nil
}

// FetchBundle fetches the trust bundle after the given version.
func (u *Uplink) FetchBundle(ctx context.Context, version uint64) (*protocol.Envelope, error) {
	answer, err := u.fetch(ctx, &protocol.FetchRequest{
		Request:       &protocol.FetchRequest_Bundle{Bundle: true},
		BundleVersion: version,
	})
	if err != nil {
		return nil, err
	}
	return answer.GetBundle(), nil
}

// fetch makes one request and returns the answer, unless that is a refusal.
func (u *Uplink) fetch(ctx context.Context, request *protocol.FetchRequest) (*protocol.FetchResponse, error) {
	u.mu.Lock()
	conn := u.conn
	u.mu.Unlock()
	if conn == nil {
		return nil, errNoSession()
	}
	ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	answer := &protocol.FetchResponse{}
	if err := exchange(ctx, conn, request, answer); err != nil {
		return nil, fault.New(fault.Unavailable, agent.CodeHubAway, "The session to the hub was lost.", err)
	}
	switch reason := answer.GetErrorReason(); reason {
	case protocol.Nack_REASON_UNSPECIFIED:
		return answer, nil
	case protocol.Nack_UNAVAILABLE:
		return nil, fault.New(fault.Unavailable, fault.Code(reason.Text()), "The hub cannot answer at the moment.", nil)
	default:
		return nil, fault.New(fault.Forbidden, fault.Code(reason.Text()), "The hub refuses: "+reason.Text()+".", nil)
	}
}

// exchange sends a request on a stream of its own and receives the answer.
func exchange(ctx context.Context, conn *link.Conn, request *protocol.FetchRequest,
	answer *protocol.FetchResponse,
) error {
	stream, err := conn.Open(ctx, &protocol.StreamHeader{
		Kind:        protocol.StreamHeader_KIND_FETCH,
		Traceparent: telemetry.Traceparent(ctx),
	})
	if err != nil {
		return err
	}
	defer stream.Abort()
	defer context.AfterFunc(ctx, stream.Abort)()
	if err := stream.Send(request); err != nil {
		return err
	}
	if err := stream.CloseWrite(); err != nil {
		return err
	}
	return stream.Receive(answer, protocol.MaxFetchBytes)
}
