package spool_test

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/gpuaas/gpuaas/agent/spool"
	"github.com/gpuaas/gpuaas/agent/spool/spooltest"
	"github.com/gpuaas/gpuaas/protocol"
)

var noon = time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)

func first() spool.Chain { return spool.Chain{NodeID: "n1", Incarnation: "i1"} }

func records(from, n int) []*protocol.UsageRecord {
	out := make([]*protocol.UsageRecord, n)
	for i := range out {
		out[i] = &protocol.UsageRecord{
			MemberId: "m1", Meter: protocol.MeterSessionSeconds, Quantity: int64(from + i),
			RunId: "r1",
		}
	}
	return out
}

func TestNothingWaitingSealsNothing(t *testing.T) {
	sealed, c, rest, err := spool.Seal(first(), nil, noon)
	require.NoError(t, err)
	require.Nil(t, sealed.Segment)
	require.Empty(t, rest)
	require.Equal(t, first(), c)
}

func TestSegmentStaysBelowBothLimits(t *testing.T) {
	_, c, rest, err := spool.Seal(first(), records(0, spool.MaxSegmentRecords+7), noon)
	require.NoError(t, err)
	require.Len(t, rest, 7)
	require.EqualValues(t, spool.MaxSegmentRecords, c.Sequence)

	big := records(0, spool.MaxSegmentRecords)
	for _, r := range big {
		r.RunId = strings.Repeat("x", 1024)
	}
	sealed, c, rest, err := spool.Seal(first(), big, noon)
	require.NoError(t, err)
	require.LessOrEqual(t, len(sealed.Payload), protocol.MaxSegmentBytes)
	require.Greater(t, len(sealed.Payload), protocol.MaxSegmentBytes/2)
	require.Len(t, rest, spool.MaxSegmentRecords-int(c.Sequence))
}

func TestFollowRefusesAnythingButTheNextSegment(t *testing.T) {
	s1, c1, _, err := spool.Seal(first(), records(0, 3), noon)
	require.NoError(t, err)
	s2, c2, _, err := spool.Seal(c1, records(3, 2), noon)
	require.NoError(t, err)

	_, got, err := spooltest.VerifyNext(first(), s1.Payload)
	require.NoError(t, err)
	require.Equal(t, c1, got)
	_, got, err = spooltest.VerifyNext(got, s2.Payload)
	require.NoError(t, err)
	require.Equal(t, c2, got)

	for name, tc := range map[string]struct {
		at      spool.Chain
		payload []byte
	}{
		"again":        {c1, s1.Payload},
		"one left out": {first(), s2.Payload},
		"other predecessor": {
			spool.Chain{NodeID: "n1", Incarnation: "i1", Number: 1, Sequence: 3, SHA256: make([]byte, 32)},
			s2.Payload,
		},
		"other node":        {spool.Chain{NodeID: "n2", Incarnation: "i1"}, s1.Payload},
		"other incarnation": {spool.Chain{NodeID: "n1", Incarnation: "i2"}, s1.Payload},
		"not a segment":     {first(), []byte("\xff\xff")},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := spooltest.VerifyNext(tc.at, tc.payload)
			require.Error(t, err)
		})
	}
}

func TestRecordSequenceGapIsRefused(t *testing.T) {
	s1, _, _, err := spool.Seal(first(), records(0, 3), noon)
	require.NoError(t, err)
	s1.Segment.Records[1].Sequence = 9
	payload, err := proto.Marshal(s1.Segment)
	require.NoError(t, err)
	_, _, err = spooltest.VerifyNext(first(), payload)
	require.ErrorContains(t, err, "where 2 was due")
}

func TestHubThatKnowsMoreMeansTheStoreIsBehind(t *testing.T) {
	_, err := spool.Acknowledge(spool.Marks{}, spool.Chain{Incarnation: "i1", Number: 3}, spool.HubProgress{
		Incarnation: "i1",
		Posted:      4, Archived: 4,
	}, nil)
	require.ErrorIs(t, err, spool.ErrOtherStore)
	m, err := spool.Acknowledge(spool.Marks{Posted: 1}, spool.Chain{Incarnation: "i1", Number: 3},
		spool.HubProgress{Incarnation: "i0", Posted: 9, Archived: 9}, nil)
	require.NoError(t, err, "another incarnation says nothing about this chain")
	require.Equal(t, spool.Marks{Posted: 1}, m)
}

// A hub that is wrong about its own archive makes no node delete what the hub has not billed.
func TestWhatIsNotPostedIsNotArchived(t *testing.T) {
	m, err := spool.Acknowledge(spool.Marks{Posted: 1, Archived: 1}, spool.Chain{Incarnation: "i1", Number: 5},
		spool.HubProgress{Incarnation: "i1", Posted: 3, Archived: 5}, nil)
	require.NoError(t, err)
	require.Equal(t, spool.Marks{Posted: 3, Archived: 3}, m)
	require.EqualValues(t, 3, spool.PruneUpTo(m))
}

// A store that was put back and went on has sealed as many segments as the hub has posted, or more: only their content
// tells.
func TestLaw05HubThatPostedOtherSegmentsMeansTheStoreIsAnother(t *testing.T) {
	sum := func(s string) []byte { d := sha256.Sum256([]byte(s)); return d[:] }
	chain := spool.Chain{Incarnation: "i1", Number: 3, SHA256: sum("three")}
	before := spool.Marks{Posted: 1}
	for name, c := range map[string]struct {
		said  spool.HubProgress
		own   []byte
		other bool
		after spool.Marks
	}{
		"the same segment": {
			spool.HubProgress{Posted: 2, PostedSHA256: sum("two")},
			sum("two"), false,
			spool.Marks{Posted: 2},
		},
		"another under the same number": {
			spool.HubProgress{Posted: 2, PostedSHA256: sum("two of another")},
			sum("two"), true,
			before,
		},
		"the newest, the same": {
			spool.HubProgress{Posted: 3, PostedSHA256: sum("three")},
			nil, false,
			spool.Marks{Posted: 3},
		},
		"the newest, another": {
			spool.HubProgress{Posted: 3, PostedSHA256: sum("three of another")},
			nil, true,
			before,
		},
		"late, of another": {
			spool.HubProgress{Posted: 1, PostedSHA256: sum("one of another")},
			sum("one"), true,
			before,
		},
		"one that was archived and is gone": {spool.HubProgress{Posted: 1, PostedSHA256: sum("one")}, nil, false, before},
		"a hub that does not say":           {spool.HubProgress{Posted: 3}, nil, false, spool.Marks{Posted: 3}},
		"nothing posted":                    {spool.HubProgress{}, nil, false, before},
	} {
		c.said.Incarnation = "i1"
		m, err := spool.Acknowledge(before, chain, c.said, c.own)
		require.Equal(t, c.other, errors.Is(err, spool.ErrOtherStore), name)
		require.Equal(t, c.after, m, name)
	}
}

func TestASegmentIsSealedAgainOnANewChain(t *testing.T) {
	_, c, _, err := spool.Seal(first(), records(0, 2), noon)
	require.NoError(t, err)
	old, c, _, err := spool.Seal(c, records(2, 2), noon)
	require.NoError(t, err)
	fresh := spool.Reincarnate(c, "i2")
	require.Equal(t, spool.Chain{NodeID: "n1", Incarnation: "i2"}, fresh)
	s, fresh, _, err := spool.Seal(fresh, spool.Unsealed(old.Segment), noon)
	require.NoError(t, err)
	require.EqualValues(t, 2, fresh.Sequence)
	require.EqualValues(t, 2, s.Segment.GetRecords()[0].GetQuantity())
	require.EqualValues(t, 3, old.Segment.GetRecords()[0].GetSequence(), "the old segment is not touched")
}

// TestLaw05SpoolLosesAndDoublesNothing lets a node seal, send, lose its connection and be killed, against a hub that
// posts what follows and acknowledges late, repeatedly or not at all: the hub has every record once, in order, and the
// node has forgotten none before.
func TestLaw05SpoolLosesAndDoublesNothing(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		n := &delivery{chain: first(), segments: map[uint64][]byte{}, hub: first(), acks: []uint64{0}}
		rt.Repeat(map[string]func(*rapid.T){
			"measure":           func(rt *rapid.T) { n.measure(rapid.IntRange(1, 5).Draw(rt, "records")) },
			"seal":              func(rt *rapid.T) { n.seal(rt, true) },
			"killed in sealing": func(rt *rapid.T) { n.seal(rt, false); n.inFlight = 0 },
			"send":              func(rt *rapid.T) { n.send(rt) },
			"reconnect":         func(*rapid.T) { n.inFlight = 0 },
			"acknowledgement":   func(rt *rapid.T) { n.acknowledge(rt, rapid.SampledFrom(n.acks).Draw(rt, "number")) },
		})
		n.deliverAll(rt)
		require.Len(rt, n.posted, n.made)
		for i, q := range n.posted {
			require.EqualValues(rt, i, q, "the record's place")
		}
	})
}

// delivery is one node's spool and the hub that it sends to. chain, marks, waiting and segments are on the node's disk.
type delivery struct {
	chain    spool.Chain
	marks    spool.Marks
	waiting  []*protocol.UsageRecord
	segments map[uint64][]byte
	inFlight uint64
	made     int
	// hub is the chain that the hub has verified, posted its records, acks what it may acknowledge.
	hub    spool.Chain
	posted []int64
	acks   []uint64
}

func (n *delivery) measure(count int) {
	n.waiting = append(n.waiting, records(n.made, count)...)
	n.made += count
}

// seal seals a segment; without keep the node is killed before the segment is stored.
func (n *delivery) seal(t *rapid.T, keep bool) {
	sealed, chain, rest, err := spool.Seal(n.chain, n.waiting, noon)
	require.NoError(t, err)
	if keep && sealed.Segment != nil {
		n.segments[chain.Number] = sealed.Payload
		n.chain, n.waiting = chain, rest
	}
}

// send gives the next segment to the hub, and reports whether there was one. A segment that the hub knows is
// acknowledged again.
func (n *delivery) send(t *rapid.T) bool {
	const window = 4
	number := n.marks.Posted + n.inFlight + 1
	if n.inFlight == window || number > n.chain.Number {
		return false
	}
	payload, kept := n.segments[number]
	require.True(t, kept, "segment %d was forgotten before it was posted", number)
	n.inFlight++
	if number <= n.hub.Number {
		return true
	}
	seg, chain, err := spooltest.VerifyNext(n.hub, payload)
	require.NoError(t, err)
	n.hub = chain
	for _, r := range seg.GetRecords() {
		n.posted = append(n.posted, r.GetQuantity())
	}
	n.acks = append(n.acks, n.hub.Number)
	return true
}

func (n *delivery) acknowledge(t *rapid.T, number uint64) {
	said := spool.HubProgress{Incarnation: "i1", Posted: number, Archived: number}
	marks, err := spool.Acknowledge(n.marks, n.chain, said, nil)
	require.NoError(t, err)
	n.inFlight -= min(n.inFlight, marks.Posted-n.marks.Posted)
	n.marks = marks
	for number := range n.segments {
		if number <= spool.PruneUpTo(marks) {
			delete(n.segments, number)
		}
	}
}

// deliverAll seals and sends the rest.
func (n *delivery) deliverAll(t *rapid.T) {
	for n.seal(t, true); len(n.waiting) > 0; n.seal(t, true) {
		continue
	}
	for n.inFlight = 0; n.marks.Posted < n.chain.Number; n.inFlight = 0 {
		require.True(t, n.send(t), "not all is posted")
		n.acknowledge(t, n.hub.Number)
	}
}

func TestChainAndMarksSurviveAsJSON(t *testing.T) {
	_, c, _, err := spool.Seal(first(), records(0, 3), noon)
	require.NoError(t, err)
	b, err := json.Marshal(c)
	require.NoError(t, err)
	var back spool.Chain
	require.NoError(t, json.Unmarshal(b, &back))
	require.Equal(t, c, back)
}

func TestRewindSendsAgainWhatARestoredHubHasForgotten(t *testing.T) {
	m, err := spool.Rewind(spool.Marks{Posted: 9, Archived: 4}, 6)
	require.NoError(t, err)
	require.Equal(t, spool.Marks{Posted: 6, Archived: 4}, m)
	m, err = spool.Rewind(spool.Marks{Posted: 3, Archived: 3}, 6)
	require.NoError(t, err)
	require.Equal(t, spool.Marks{Posted: 3, Archived: 3}, m, "a hub that is ahead is for Acknowledge")
	m, err = spool.Rewind(spool.Marks{Posted: 9, Archived: 4}, 3)
	require.Error(t, err, "what was archived may be gone here")
	require.Equal(t, spool.Marks{Posted: 9, Archived: 4}, m)
}

func TestWhatIsKeptForABackupIsBounded(t *testing.T) {
	const each = spool.MaxKeptBytes / 4
	sizes := map[uint64]int64{}
	for n := uint64(1); n <= 10; n++ {
		sizes[n] = each
	}
	require.Equal(t, spool.Marks{Posted: 10, Archived: 6}, spool.Forget(spool.Marks{Posted: 10, Archived: 2}, sizes))
	require.Equal(t, spool.Marks{Posted: 10, Archived: 8}, spool.Forget(spool.Marks{Posted: 10, Archived: 8}, sizes))
	require.Equal(t, spool.Marks{Posted: 2}, spool.Forget(spool.Marks{Posted: 2}, sizes))
}
