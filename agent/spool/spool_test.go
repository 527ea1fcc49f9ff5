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

	_, got, err := spool.VerifyNext(first(), s1.Payload)
	require.NoError(t, err)
	require.Equal(t, c1, got)
	_, got, err = spool.VerifyNext(got, s2.Payload)
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
			_, _, err := spool.VerifyNext(tc.at, tc.payload)
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
	_, _, err = spool.VerifyNext(first(), payload)
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

func TestReincarnateKeepsWhatIsNotArchived(t *testing.T) {
	s1, c, _, err := spool.Seal(first(), records(0, 2), noon)
	require.NoError(t, err)
	s2, c, _, err := spool.Seal(c, records(2, 2), noon)
	require.NoError(t, err)
	kept := []*protocol.UsageSegment{s1.Segment, s2.Segment}
	fresh, waiting := spool.Reincarnate(c, "i2", spool.Marks{Posted: 2, Archived: 1}, kept, records(4, 1))
	require.Equal(t, spool.Chain{NodeID: "n1", Incarnation: "i2"}, fresh)
	require.Len(t, waiting, 3)
	s, fresh, _, err := spool.Seal(fresh, waiting, noon)
	require.NoError(t, err)
	require.EqualValues(t, 3, fresh.Sequence)
	require.EqualValues(t, 2, s.Segment.GetRecords()[0].GetQuantity())
	require.EqualValues(t, 3, s2.Segment.GetRecords()[0].GetSequence(), "the old segment is not touched")
}

// TestLaw05SpoolLosesAndDoublesNothing lets a node seal, send, lose its connection and be killed, against a hub that
// posts what follows and acknowledges late, repeatedly or not at all: the hub has every record once, in order, and the
// node has forgotten none before.
func TestLaw05SpoolLosesAndDoublesNothing(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		const window = 4
		disk := struct {
			Chain   spool.Chain
			Marks   spool.Marks
			Waiting []*protocol.UsageRecord
		}{Chain: first()}
		segments := map[uint64][]byte{}
		hub, posted := first(), []int64{}
		acks := []uint64{0}
		inFlight, made := uint64(0), 0
		seal := func(keep bool) {
			sealed, c, rest, err := spool.Seal(disk.Chain, disk.Waiting, noon)
			if err != nil {
				rt.Fatal(err)
			}
			if keep && sealed.Segment != nil {
				segments[c.Number] = sealed.Payload
				disk.Chain, disk.Waiting = c, rest
			}
		}
		send := func() bool {
			number := disk.Marks.Posted + inFlight + 1
			if inFlight == window || number > disk.Chain.Number {
				return false
			}
			payload, kept := segments[number]
			if !kept {
				rt.Fatalf("segment %d was forgotten before it was posted", number)
			}
			inFlight++
			if number <= hub.Number {
				return true // the hub knows this one: acknowledged again below
			}
			seg, c, err := spool.VerifyNext(hub, payload)
			if err != nil {
				rt.Fatal(err)
			}
			hub = c
			for _, r := range seg.GetRecords() {
				posted = append(posted, r.GetQuantity())
			}
			acks = append(acks, hub.Number)
			return true
		}
		acknowledge := func(n uint64) {
			before := disk.Marks.Posted
			m, err := spool.Acknowledge(disk.Marks, disk.Chain, spool.HubProgress{Incarnation: "i1", Posted: n, Archived: n},
				nil)
			if err != nil {
				rt.Fatal(err)
			}
			disk.Marks = m
			inFlight -= min(inFlight, m.Posted-before)
			for number := range segments {
				if number <= spool.PruneUpTo(m) {
					delete(segments, number)
				}
			}
		}
		rt.Repeat(map[string]func(*rapid.T){
			"measure": func(rt *rapid.T) {
				n := rapid.IntRange(1, 5).Draw(rt, "records")
				disk.Waiting = append(disk.Waiting, records(made, n)...)
				made += n
			},
			"seal":              func(*rapid.T) { seal(true) },
			"killed in sealing": func(*rapid.T) { seal(false); inFlight = 0 },
			"send":              func(*rapid.T) { send() },
			"reconnect":         func(*rapid.T) { inFlight = 0 },
			"acknowledgement":   func(rt *rapid.T) { acknowledge(rapid.SampledFrom(acks).Draw(rt, "number")) },
		})
		for seal(true); len(disk.Waiting) > 0; seal(true) {
			continue
		}
		for inFlight = 0; disk.Marks.Posted < disk.Chain.Number; {
			if !send() {
				rt.Fatal("nothing to send, and not all is posted")
			}
			acknowledge(hub.Number)
			inFlight = 0
		}
		if len(posted) != made {
			rt.Fatalf("%d records posted of %d", len(posted), made)
		}
		for i, q := range posted {
			if q != int64(i) {
				rt.Fatalf("record %d came at place %d", q, i)
			}
		}
	})
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
