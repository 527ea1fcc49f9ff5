package uplink

import (
	"context"
	"errors"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/hubsession"
	"github.com/gpuaas/gpuaas/pkg/failpoint"
	"github.com/gpuaas/gpuaas/protocol"
)

// report sends the observed state on change and every interval, and refusals as they come.
func (s *session) report(ctx context.Context) error {
	ticker := time.NewTicker(s.u.cfg.ReportInterval)
	defer ticker.Stop()
	for {
		if !s.sendRefusals() {
			return errors.New("the control stream is closed")
		}
		if r := s.observer.Report(); r.Passes > 0 {
			if err := s.sendReport(ctx, r); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		case <-s.u.observed:
			if !s.awaitReportAck(ctx) {
				return ctx.Err()
			}
		case <-s.u.acceptor.Queued():
		case cause := <-s.unreadable:
			return s.sendLastRefusals(ctx, cause)
		}
	}
}

// awaitReportAck waits until the hub has acknowledged the last report. It returns false when ctx has ended.
func (s *session) awaitReportAck(ctx context.Context) bool {
	limit := time.NewTimer(hubsession.ReportAckTimeout)
	defer limit.Stop()
	for {
		s.mu.Lock()
		waiting := s.reports.Waiting()
		s.mu.Unlock()
		if !waiting {
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-limit.C:
			return true
		case <-s.acks:
		}
	}
}

func (s *session) sendReport(ctx context.Context, r agent.Report) error {
	if err := s.sendPulls(true); err != nil {
		return err
	}
	now := s.u.clock.Now()
	members := s.u.store.Members()
	s.mu.Lock()
	counter, workloads := s.reports.Next(r.Workloads, now, func(id string) bool { return members[id].Reported })
	s.reportedAt = s.u.clock.SinceBoot()
	s.mu.Unlock()
	end := s.traceStatuses(ctx, workloads)
	out := &protocol.Report{
		Counter: counter, At: timestamppb.New(now), Epoch: r.Epoch, Generation: r.Generation, Conditions: r.Conditions,
		Workloads: workloads, Accelerators: r.Accelerators, Environments: r.Environments, Volumes: r.Volumes,
	}
	err := s.send(&protocol.NodeMessage{Message: &protocol.NodeMessage_Report{Report: out}})
	end(err)
	failpoint.Hit("agent/report/sent")
	return err
}

// acknowledged notes that the hub has stored a report: the proofs in it need no repeating. The answer to the newest
// report corrects the clock.
func (s *session) acknowledged(ctx context.Context, ack *protocol.ReportAck) error {
	s.mu.Lock()
	ids := s.reports.Acknowledge(ack.GetCounter())
	s.acks.Send()
	newest, sent := !s.reports.Waiting(), s.reportedAt
	s.mu.Unlock()
	if newest {
		s.syncClock(ctx, ack.GetHubTime(), sent)
	}
	if len(ids) == 0 {
		return nil
	}
	failpoint.Hit("agent/report/acknowledged")
	return s.u.store.AcknowledgeRemovals(ids)
}
