package hubsession_test

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/agent/hubsession"
	"github.com/gpuaas/gpuaas/agent/spool"
	"github.com/gpuaas/gpuaas/protocol"
)

// fakeStore records what a welcome does to it.
type fakeStore struct {
	posted      uint64
	acknowledge error
	rewind      error
	rewound     []uint64
	renewed     int
}

func (s *fakeStore) PostedSegment() uint64 { return s.posted }

func (s *fakeStore) AcknowledgeUsage(spool.HubProgress) error { return s.acknowledge }

func (s *fakeStore) RewindUsage(posted uint64) error {
	s.rewound = append(s.rewound, posted)
	return s.rewind
}

func (s *fakeStore) TakeNewIncarnation(error) error {
	s.renewed++
	return nil
}

func TestWelcomeDecidesWhatHappensToTheStore(t *testing.T) {
	errDisk := errors.New("disk")
	for name, c := range map[string]struct {
		store   fakeStore
		welcome hubsession.Welcome
		rewound []uint64
		renewed int
		err     error
	}{
		"the hub has posted what the store says": {
			store: fakeStore{posted: 4}, welcome: hubsession.Welcome{HubProgress: spool.HubProgress{Posted: 4}},
		},
		"the hub has posted more": {
			store: fakeStore{posted: 4}, welcome: hubsession.Welcome{NewIncarnation: true},
			renewed: 1, err: hubsession.ErrNewIncarnation,
		},
		"the hub has posted other segments": {
			store: fakeStore{acknowledge: spool.ErrOtherStore}, renewed: 1, err: hubsession.ErrNewIncarnation,
		},
		"the store cannot be written": {store: fakeStore{acknowledge: errDisk}, err: errDisk},
		"a restored hub": {
			store: fakeStore{posted: 4}, welcome: hubsession.Welcome{HubProgress: spool.HubProgress{Posted: 2}},
			rewound: []uint64{2},
		},
		"a restored hub that lacks pruned segments": {
			store: fakeStore{posted: 4, rewind: errDisk}, rewound: []uint64{0}, renewed: 1,
			err: hubsession.ErrNewIncarnation,
		},
	} {
		t.Run(name, func(t *testing.T) {
			require.ErrorIs(t, hubsession.Open(&c.store, c.welcome), c.err)
			require.Equal(t, c.rewound, c.store.rewound)
			require.Equal(t, c.renewed, c.store.renewed)
		})
	}
}

func TestUploadFillsItsWindowAndStartsAgainFromARefusedSegment(t *testing.T) {
	u := hubsession.NewUpload(7)
	for want := uint64(8); want < 8+hubsession.UsageWindow; want++ {
		number, ok := u.Next()
		require.True(t, ok)
		require.Equal(t, want, number)
		u.Sent()
	}
	_, ok := u.Next()
	require.False(t, ok, "the window is full")
	require.Empty(t, u.Acknowledged(0))
	_, ok = u.Next()
	require.True(t, ok)
	for range hubsession.UsageWindow - 2 {
		require.Empty(t, u.Acknowledged(protocol.Nack_UNAVAILABLE), "others are in flight")
		_, ok = u.Next()
		require.False(t, ok, "nothing follows a refused segment")
	}
	require.Equal(t, protocol.Nack_UNAVAILABLE, u.Acknowledged(protocol.Nack_OUT_OF_ORDER), "the first reason counts")
	require.False(t, u.Waiting())
	u.Restart(8)
	number, ok := u.Next()
	require.True(t, ok)
	require.EqualValues(t, 9, number)
}

func TestReportRepeatsRemovalsUntilTheyAreAcknowledged(t *testing.T) {
	now := time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)
	removed := func(id string, ago time.Duration) *protocol.WorkloadStatus {
		return &protocol.WorkloadStatus{
			MemberId: id,
			Removal:  &protocol.RemovalProof{At: timestamppb.New(now.Add(-ago))},
		}
	}
	observed := []*protocol.WorkloadStatus{
		{MemberId: "running"}, removed("today", time.Hour), removed("long ago", 48*time.Hour),
	}
	acknowledged := map[string]bool{"long ago": true, "today": true}
	ids := func(workloads []*protocol.WorkloadStatus) (out []string) {
		for _, w := range workloads {
			out = append(out, w.GetMemberId())
		}
		return out
	}
	var r hubsession.Reports
	counter, workloads := r.Next(observed, now, func(id string) bool { return acknowledged[id] })
	require.EqualValues(t, 1, counter)
	require.Equal(t, []string{"running", "today"}, ids(workloads), "the first report repeats those of the last day")
	_, workloads = r.Next(observed, now, func(id string) bool { return acknowledged[id] })
	require.Equal(t, []string{"running"}, ids(workloads))
	delete(acknowledged, "today")
	_, workloads = r.Next(observed, now, func(id string) bool { return acknowledged[id] })
	require.Equal(t, []string{"running", "today"}, ids(workloads))
	require.True(t, r.Waiting())
	require.Equal(t, []string{"today"}, r.Acknowledge(3))
	require.False(t, r.Waiting())
	require.Empty(t, r.Acknowledge(1), "an older acknowledgement says nothing new")
	require.False(t, r.Waiting())
}
