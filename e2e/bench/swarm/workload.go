package swarm

import (
	"crypto/sha256"
	"fmt"
	"net"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/protocol"
)

// firstPort is the port of a node that its first workload publishes.
const firstPort = 30_000

// workload is what a simulated node keeps of a workload: it is ready as soon as its document is accepted, and gone as
// soon as a state does not name it.
type workload struct {
	member, instance, correlation string
	revision                      uint64
	stopped, removed              bool
	since                         time.Time
}

// workloadsOf reads the documents that a state names; all of them come with the push while they are few.
func workloadsOf(state *protocol.DesiredState, parts [][]byte) ([]workload, error) {
	bySum := make(map[[sha256.Size]byte][]byte, len(parts))
	for _, p := range parts {
		bySum[sha256.Sum256(p)] = p
	}
	var all []workload
	for _, ref := range state.GetParts() {
		if len(ref.GetSha256()) != sha256.Size {
			return nil, fmt.Errorf("the digest of part %s has %d bytes", ref.GetId(), len(ref.GetSha256()))
		}
		document, ok := bySum[[sha256.Size]byte(ref.GetSha256())]
		if !ok {
			return nil, fmt.Errorf("part %s did not come with its state", ref.GetId())
		}
		var w protocol.Workload
		if err := proto.Unmarshal(document, &w); err != nil {
			return nil, err
		}
		all = append(all, workload{
			member: w.GetId(), instance: w.GetInstanceId(), correlation: w.GetCorrelationId(), revision: w.GetRevision(),
			stopped: w.GetStopped(),
		})
	}
	return all, nil
}

// succeed replaces the workloads by those of a new state. What stays keeps its start, what leaves is reported as
// removed until the state after that.
func succeed(old, next []workload, now time.Time) []workload {
	at := make(map[string]int, len(next))
	for i := range next {
		next[i].since = now
		at[next[i].member] = i
	}
	for _, o := range old {
		i, stays := at[o.member]
		switch {
		case stays && next[i].revision == o.revision && next[i].stopped == o.stopped:
			next[i].since = o.since
		case !stays && !o.removed:
			o.removed, o.since = true, now
			next = append(next, o)
		}
	}
	return slices.Clip(next)
}

// statusesOf is what an agent would report about the workloads.
func statusesOf(workloads []workload, host net.IP, incarnation string) []*protocol.WorkloadStatus {
	var all []*protocol.WorkloadStatus
	for i, w := range workloads {
		since := timestamppb.New(w.since)
		s := &protocol.WorkloadStatus{
			MemberId: w.member, InstanceId: w.instance, CorrelationId: w.correlation, Revision: w.revision,
		}
		switch {
		case w.removed:
			s.Status = protocol.WorkloadStatus_REMOVED
			s.Removal = &protocol.RemovalProof{
				At: since, Absent: protocol.RemovalKinds(), Incarnation: incarnation,
			}
		case w.stopped:
			s.Status = protocol.WorkloadStatus_STOPPED
		default:
			s.Status, s.StartedAt, s.ReadyAt = protocol.WorkloadStatus_READY, since, since
			s.Endpoints = []*protocol.PublishedEndpoint{{
				Name: "http", Protocol: "http", Host: host.String(), Port: uint32(firstPort + i),
			}}
		}
		all = append(all, s)
	}
	return all
}
