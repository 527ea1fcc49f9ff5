package fleet_test

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/fleet"
	"github.com/gpuaas/gpuaas/hub/internal/fleet/fleettest"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

var now = time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC)

// do runs one transaction.
func do[T any](t *testing.T, d *db.DB, fn func(ctx context.Context, tx db.Tx) (T, error)) (T, error) {
	t.Helper()
	return db.RunTx(t.Context(), d, func(tx db.Tx) (T, error) { return fn(t.Context(), tx) })
}

func must[T any](t *testing.T, d *db.DB, fn func(ctx context.Context, tx db.Tx) (T, error)) T {
	t.Helper()
	out, err := do(t, d, fn)
	require.NoError(t, err)
	return out
}

func token(t *testing.T, d *db.DB) string {
	t.Helper()
	secret, err := fleet.NewJoinSecret()
	require.NoError(t, err)
	must(t, d, func(ctx context.Context, tx db.Tx) (fleet.JoinToken, error) {
		return fleet.CreateToken(ctx, tx, fleet.NewToken{ID: db.NewID(), Secret: secret, CreatedBy: "admin"}, now)
	})
	return secret
}

func key(t *testing.T) (ed25519.PublicKey, ed25519.PrivateKey) {
	t.Helper()
	pub, priv, err := ed25519.GenerateKey(rand.Reader)
	require.NoError(t, err)
	return pub, priv
}

func enroll(t *testing.T, d *db.DB, secret string, pub ed25519.PublicKey, at time.Time) (fleet.Node, bool, error) {
	t.Helper()
	type result struct {
		n   fleet.Node
		new bool
	}
	r, err := do(t, d, func(ctx context.Context, tx db.Tx) (result, error) {
		n, did, err := fleet.Enroll(ctx, tx, fleet.Enrollment{
			NodeID: db.NewID(), Secret: secret, Hostname: "gpu-1",
			PublicKey: pub, CertificateExpiresAt: at.Add(time.Hour),
		}, at)
		return result{n, did == fleet.Enrolled}, err
	})
	return r.n, r.new, err
}

func node(t *testing.T, d *db.DB) fleet.Node {
	t.Helper()
	pub, _ := key(t)
	n, fresh, err := enroll(t, d, token(t, d), pub, now)
	require.NoError(t, err)
	require.True(t, fresh)
	return n
}

func codeOf(t *testing.T, err error) string {
	t.Helper()
	require.Error(t, err)
	return string(fault.As(err).Code)
}

func TestJoinTokenLetsOneNodeInOnce(t *testing.T) {
	d := dbtest.New(t)
	secret := token(t, d)
	pub, _ := key(t)
	first, fresh, err := enroll(t, d, secret, pub, now)
	require.NoError(t, err)
	require.True(t, fresh)
	require.Equal(t, fleet.Offline, first.Status(now))

	again, fresh, err := enroll(t, d, secret, pub, now.Add(time.Minute))
	require.NoError(t, err, "an answer that was lost can be asked for again")
	require.False(t, fresh)
	require.Equal(t, first.ID, again.ID)

	again, fresh, err = enroll(t, d, secret, pub, now.Add(2*fleet.DefaultTokenTTL))
	require.NoError(t, err, "also once the token has expired: the node has no other way to its id")
	require.False(t, fresh)
	require.Equal(t, first.ID, again.ID)

	other, _ := key(t)
	_, _, err = enroll(t, d, secret, other, now)
	require.Equal(t, "join_token_invalid", codeOf(t, err))

	list := must(t, d, func(ctx context.Context, tx db.Tx) ([]fleet.JoinToken, error) {
		return fleet.ListTokens(ctx, tx, db.Page{Limit: 10})
	})
	require.Len(t, list, 1)
	require.Equal(t, "used", list[0].Status(now))
	require.Equal(t, first.ID, list[0].NodeID)
}

func TestEnrollmentIsRefused(t *testing.T) {
	d := dbtest.New(t)
	pub, _ := key(t)
	_, _, err := enroll(t, d, "gpuaas-join-unknown", pub, now)
	require.Equal(t, "join_token_invalid", codeOf(t, err), "unknown")
	_, _, err = enroll(t, d, token(t, d), pub, now.Add(fleet.DefaultTokenTTL))
	require.Equal(t, "join_token_invalid", codeOf(t, err), "expired")

	_, _, err = enroll(t, d, token(t, d), pub, now)
	require.NoError(t, err)
	second := token(t, d)
	_, _, err = enroll(t, d, second, pub, now)
	require.Equal(t, "node_key_in_use", codeOf(t, err), "one key is one node")
	other, _ := key(t)
	_, fresh, err := enroll(t, d, second, other, now)
	require.NoError(t, err, "a refused enrollment does not use the token up")
	require.True(t, fresh)
}

func TestRenewalNeedsTheKeyAndNoBan(t *testing.T) {
	pub, priv := key(t)
	n := fleet.Node{ID: "n1", PublicKey: pub}
	message := fleet.RenewalMessage("n1", "csr", "1970-01-01T00:00:00Z")
	require.NoError(t, fleet.MayRenew(n, pub, message, ed25519.Sign(priv, message)))
	other, otherPriv := key(t)
	require.Equal(t, "proof_invalid", codeOf(t, fleet.MayRenew(n, pub, message, ed25519.Sign(otherPriv, message))))
	require.Equal(t, "proof_invalid", codeOf(t, fleet.MayRenew(n, other, message, ed25519.Sign(priv, message))),
		"another key in the request")
	require.Equal(t, "proof_invalid", codeOf(t, fleet.MayRenew(n, pub, message, nil)))
	n.BannedAt = now
	require.Equal(t, "proof_invalid", codeOf(t, fleet.MayRenew(n, pub, message, nil)),
		"a stranger does not learn of the ban")
	require.Equal(t, "node_banned", codeOf(t, fleet.MayRenew(n, pub, message, ed25519.Sign(priv, message))))
}

func connect(t *testing.T, d *db.DB, id string, hello *protocol.Hello, posted uint64,
	at time.Time,
) (fleet.ConnectResult, error) {
	t.Helper()
	return do(t, d, func(ctx context.Context, tx db.Tx) (fleet.ConnectResult, error) {
		return fleettest.Connect(ctx, tx, fleet.Connection{NodeID: id, ReplicaID: "r1", Hello: hello, PostedSegment: posted},
			at)
	})
}

func TestStatusFollowsTheConnection(t *testing.T) {
	d := dbtest.New(t)
	n := node(t, d)
	c, err := connect(t, d, n.ID, &protocol.Hello{Incarnation: "i1", Facts: &protocol.NodeFacts{
		Hostname: "real-name",
		CpuCores: 8,
	}}, 0, now)
	require.NoError(t, err)
	require.Equal(t, uint64(1), c.SessionNo)
	require.Equal(t, "real-name", c.Node.Hostname)
	require.Equal(t, fleet.Online, c.Node.Status(now))
	require.Equal(t, fleet.Offline, c.Node.Status(now.Add(fleet.OnlineWindow)), "silence")
	require.Len(t, placeable(t, d, now), 1)
	require.Empty(t, placeable(t, d, now.Add(fleet.OnlineWindow)))

	ended := must(t, d, func(ctx context.Context, tx db.Tx) (bool, error) {
		return fleet.Disconnect(ctx, tx, n.ID, 1, now)
	})
	require.True(t, ended)
	require.Empty(t, placeable(t, d, now))

	_, err = connect(t, d, n.ID, &protocol.Hello{Incarnation: "i1"}, 0, now)
	require.NoError(t, err)
	ended = must(t, d, func(ctx context.Context, tx db.Tx) (bool, error) {
		return fleet.Disconnect(ctx, tx, n.ID, 1, now)
	})
	require.False(t, ended, "the end of an older connection says nothing about the newer one")
	require.Len(t, placeable(t, d, now), 1)

	must(t, d, func(ctx context.Context, tx db.Tx) (bool, error) {
		_, done, err := fleet.Drain(ctx, tx, n.ID, now)
		return done, err
	})
	require.Empty(t, placeable(t, d, now), "nothing new on a draining node")
}

func TestReplicaThatStopsEndsItsOwnConnectionsOnly(t *testing.T) {
	d := dbtest.New(t)
	mine, others := node(t, d), node(t, d)
	_, err := connect(t, d, mine.ID, &protocol.Hello{Incarnation: "i1"}, 0, now)
	require.NoError(t, err)
	must(t, d, func(ctx context.Context, tx db.Tx) (fleet.ConnectResult, error) {
		return fleettest.Connect(ctx, tx, fleet.Connection{
			NodeID: others.ID, ReplicaID: "r2",
			Hello: &protocol.Hello{Incarnation: "i2"},
		}, now)
	})
	end := func() int64 {
		return must(t, d, func(ctx context.Context, tx db.Tx) (int64, error) {
			return fleet.DisconnectAll(ctx, tx, "r1", now)
		})
	}
	require.EqualValues(t, 1, end())
	require.Zero(t, end(), "they have ended already")
	left := placeable(t, d, now)
	require.Len(t, left, 1)
	require.Equal(t, others.ID, left[0].ID)
}

func placeable(t *testing.T, d *db.DB, at time.Time) []fleet.Node {
	t.Helper()
	return must(t, d, func(ctx context.Context, tx db.Tx) ([]fleet.Node, error) { return fleet.ForPlacement(ctx, tx, at) })
}

func TestBannedNodeCannotConnect(t *testing.T) {
	d := dbtest.New(t)
	n := node(t, d)
	banned := must(t, d, func(ctx context.Context, tx db.Tx) (fleet.Node, error) {
		n, done, err := fleet.Ban(ctx, tx, n.ID, "stolen", now)
		require.True(t, done)
		return n, err
	})
	require.Equal(t, fleet.Banned, banned.Status(now))
	_, err := connect(t, d, n.ID, &protocol.Hello{}, 0, now)
	require.Equal(t, "node_banned", codeOf(t, err))
	require.Equal(t, []string{n.ID}, must(t, d, fleet.WithoutRenewal))
}

func TestLaw02HubNoticesAStoreThatFellBehind(t *testing.T) {
	d := dbtest.New(t)
	n := node(t, d)
	say := func(incarnation string, generation, lastSegment, posted uint64) bool {
		c, err := connect(t, d, n.ID, &protocol.Hello{
			Incarnation: incarnation, Epoch: 1, Generation: generation,
			LastSegment: lastSegment,
		}, posted, now)
		require.NoError(t, err)
		return c.StoreBehind
	}
	require.False(t, say("i1", 0, 0, 0), "a new store")
	must(t, d, func(ctx context.Context, tx db.Tx) (int, error) {
		return 0, fleet.RecordAck(ctx, tx, n.ID, protocol.Envelope_STATE, 1, 7)
	})
	require.False(t, say("i1", 7, 3, 3), "as the hub remembers it")
	require.True(t, say("i1", 7, 2, 3), "usage that the hub has is unknown to the node")
	must(t, d, func(ctx context.Context, tx db.Tx) (int, error) {
		return 0, fleet.RecordAck(ctx, tx, n.ID, protocol.Envelope_STATE, 1, 8)
	})
	require.True(t, say("i1", 7, 3, 3), "an acceptance that the hub saw is unknown to the node")
	require.True(t, say("i1", 7, 3, 3), "again, where the answer was lost on its way")
	require.False(t, say("i2", 0, 0, 0), "a new incarnation owes nothing")
}

func TestLateReportsLose(t *testing.T) {
	d := dbtest.New(t)
	n := node(t, d)
	_, err := connect(t, d, n.ID, &protocol.Hello{}, 0, now)
	require.NoError(t, err)
	report := func(session, counter uint64) bool {
		return must(t, d, func(ctx context.Context, tx db.Tx) (fleet.ReportResult, error) {
			return fleet.ApplyReport(ctx, tx, fleet.Report{
				NodeID: n.ID, SessionNo: session, Counter: counter,
				Conditions: []string{"x"},
			}, now)
		}).Fresh
	}
	require.True(t, report(1, 1))
	require.True(t, report(1, 3))
	require.False(t, report(1, 3), "the same again")
	require.False(t, report(1, 2), "overtaken")
	_, err = connect(t, d, n.ID, &protocol.Hello{}, 0, now)
	require.NoError(t, err)
	require.False(t, report(1, 9), "of an older connection")
	require.True(t, report(2, 1))
}

func TestRefusalsAreKeptOnceAndBounded(t *testing.T) {
	d := dbtest.New(t)
	n := node(t, d)
	refuse := func(reason protocol.Nack_Reason, generation uint64, at time.Time) bool {
		return must(t, d, func(ctx context.Context, tx db.Tx) (bool, error) {
			return fleet.RecordRefusal(ctx, tx, n.ID, db.NewID(), fleet.Refusal{
				Document: protocol.Envelope_STATE.Text(), Generation: generation, Reason: reason.Text(),
				Detail: strings.Repeat("é", 600), At: at,
			})
		})
	}
	require.True(t, refuse(protocol.Nack_GENERATION_OLDER, 1, now))
	require.False(t, refuse(protocol.Nack_GENERATION_OLDER, 1, now.Add(time.Minute)), "the same again is no news")
	require.True(t, refuse(protocol.Nack_GENERATION_CONFLICT, 2, now.Add(2*time.Minute)))
	require.False(t, refuse(protocol.Nack_GENERATION_OLDER, 3, now.Add(3*time.Minute)), "nor is it by turns with another")
	require.True(t, refuse(protocol.Nack_GENERATION_OLDER, 3, now.Add(2*time.Hour)), "an hour later it is")
	for g := range uint64(30) {
		require.True(t, refuse(protocol.Nack_Reason(100+g), g+2, now.Add(3*time.Hour+time.Duration(g)*time.Second)))
	}
	list := must(t, d, func(ctx context.Context, tx db.Tx) (map[string][]fleet.Refusal, error) {
		return fleet.Refusals(ctx, tx, n.ID)
	})[n.ID]
	require.Len(t, list, fleet.MaxRefusals)
	require.Equal(t, uint64(31), list[0].Generation)
	require.LessOrEqual(t, len(list[0].Detail), 512)
}

// The same reason twice is one refusal of its own node, and updates no other node's.
func TestARefusalIsItsOwnNodes(t *testing.T) {
	d := dbtest.New(t)
	one, two := node(t, d), node(t, d)
	refuse := func(nodeID string, generation uint64, at time.Time) {
		must(t, d, func(ctx context.Context, tx db.Tx) (bool, error) {
			return fleet.RecordRefusal(ctx, tx, nodeID, db.NewID(), fleet.Refusal{
				Document: protocol.Envelope_STATE.Text(), Generation: generation,
				Reason: protocol.Nack_GENERATION_OLDER.Text(), At: at,
			})
		})
	}
	refuse(one.ID, 1, now)
	refuse(two.ID, 7, now.Add(time.Second))
	refuse(one.ID, 2, now.Add(time.Minute))
	for g := range uint64(fleet.MaxRefusals + 3) {
		refuse(two.ID, 8+g, now.Add(time.Duration(2+g)*2*time.Hour))
	}
	refuse(one.ID, 3, now.Add(3*time.Hour))
	all := must(t, d, func(ctx context.Context, tx db.Tx) (map[string][]fleet.Refusal, error) {
		return fleet.Refusals(ctx, tx, one.ID, two.ID)
	})
	require.Len(t, all[one.ID], 2, "those of the other node, which are newer, take none of its places")
	require.EqualValues(t, 2, all[one.ID][1].Generation)
	require.Len(t, all[two.ID], fleet.MaxRefusals, "the other node's bound")
}

func TestTheDenyListHasWhoIsShutOut(t *testing.T) {
	d := dbtest.New(t)
	good, bad := node(t, d), node(t, d)
	must(t, d, func(ctx context.Context, tx db.Tx) (bool, error) {
		_, done, err := fleet.Ban(ctx, tx, bad.ID, "stolen", now)
		return done, err
	})
	var list fleet.DenyList
	require.False(t, list.Has(bad.ID), "nothing is loaded")
	require.NoError(t, list.Load(t.Context(), d))
	require.True(t, list.Has(bad.ID))
	require.False(t, list.Has(good.ID))
}

func TestConditionsAreAsManyAsTheyAreAndBounded(t *testing.T) {
	d := dbtest.New(t)
	n := node(t, d)
	const limit = protocol.MaxConditions
	for given, kept := range map[int]int{0: 0, 1: 1, limit: limit, limit + 1: limit} {
		facts := &protocol.NodeFacts{Conditions: make([]string, given)}
		c, err := connect(t, d, n.ID, &protocol.Hello{Incarnation: "i1", Facts: facts}, 0, now)
		require.NoError(t, err)
		require.Len(t, c.Node.Conditions, kept)
	}
}

// A hello that changes one stored field is stored, and those who wait for the node get a signal.
func TestEveryChangedFieldOfAHelloIsStored(t *testing.T) {
	d := dbtest.New(t)
	n := node(t, d)
	hello := &protocol.Hello{Incarnation: "i1", Facts: &protocol.NodeFacts{Hostname: "a"}}
	for name, change := range map[string]func(){
		"host name":   func() { hello.Facts.Hostname = "b" },
		"processors":  func() { hello.Facts.CpuCores = 4 },
		"conditions":  func() { hello.Facts.Conditions = []string{"x"} },
		"generation":  func() { hello.Epoch, hello.Generation = 1, 4 },
		"bundle":      func() { hello.BundleVersion = 3 },
		"version":     func() { hello.AgentVersion = "2" },
		"protocol":    func() { hello.ProtocolVersion = 2 },
		"features":    func() { hello.Features = []string{"f"} },
		"incarnation": func() { hello.Incarnation = "i2" },
	} {
		change()
		changed, cancel := d.Changes().Subscribe(n.ID)
		c, err := connect(t, d, n.ID, hello, 0, now)
		require.NoError(t, err, name)
		require.Len(t, changed, 1, name)
		cancel()
		stored := must(t, d, func(ctx context.Context, tx db.Tx) (fleet.Node, error) { return fleet.Get(ctx, tx, n.ID) })
		for _, field := range []func(fleet.Node) any{
			func(n fleet.Node) any { return n.Hostname }, func(n fleet.Node) any { return n.Incarnation },
			func(n fleet.Node) any { return []uint64{n.AcceptedEpoch, n.AcceptedGeneration} },
			func(n fleet.Node) any { return n.BundleVersion }, func(n fleet.Node) any { return n.AgentVersion },
			func(n fleet.Node) any { return n.ProtocolVersion }, func(n fleet.Node) any { return n.Features },
			func(n fleet.Node) any { return n.Conditions },
		} {
			require.Equal(t, field(c.Node), field(stored), name)
		}
	}
}

func TestOnlyTokensThatExpiredBeforeAreDeleted(t *testing.T) {
	d := dbtest.New(t)
	token(t, d)
	count := func(before time.Time) int {
		_, err := do(t, d, func(ctx context.Context, tx db.Tx) (string, error) {
			last, _, err := fleet.DeleteOldTokens(ctx, tx, db.Old[string]{
				After: db.FirstID(time.Time{}), Before: before, Limit: 1,
			})
			return last, err
		})
		require.NoError(t, err)
		return must(t, d, func(ctx context.Context, tx db.Tx) (int, error) {
			return db.Value[int](ctx, tx, `SELECT count(*) FROM join_tokens`)
		})
	}
	token(t, d)
	token(t, d)
	require.Equal(t, 3, count(now))
	require.Equal(t, 2, count(now.AddDate(1000, 0, 0)), "one at a time")
}

// The counter of a report is stored as it is; one that is too large is bounded.
func TestACounterOfAnUnchangedReportIsStored(t *testing.T) {
	d := dbtest.New(t)
	n := node(t, d)
	_, err := connect(t, d, n.ID, &protocol.Hello{Incarnation: "i1"}, 0, now)
	require.NoError(t, err)
	report := func(counter uint64) bool {
		return must(t, d, func(ctx context.Context, tx db.Tx) ([]bool, error) {
			return fleet.ApplyUnchangedReports(ctx, tx, []fleet.Report{{NodeID: n.ID, SessionNo: 1, Counter: counter}}, now)
		})[0]
	}
	stored := func() int64 {
		return must(t, d, func(ctx context.Context, tx db.Tx) (int64, error) {
			return db.Value[int64](ctx, tx, `SELECT report_counter FROM node_sessions WHERE node_id = $1`, n.ID)
		})
	}
	if !report(5) {
		must(t, d, func(ctx context.Context, tx db.Tx) (bool, error) {
			_, err := fleet.ApplyReport(ctx, tx, fleet.Report{NodeID: n.ID, SessionNo: 1, Counter: 5}, now)
			return true, err
		})
		require.True(t, report(6), "after one that was new, the next one says nothing else")
	}
	before := stored()
	require.Positive(t, before)
	require.True(t, report(9))
	require.EqualValues(t, 9, stored())
	require.True(t, report(1<<63))
	require.EqualValues(t, 1<<62, stored())
}

func TestTouchCountsUp(t *testing.T) {
	d := dbtest.New(t)
	n := node(t, d)
	rev := must(t, d, func(ctx context.Context, tx db.Tx) (int64, error) {
		if err := fleet.BumpIntent(ctx, tx, n.ID); err != nil {
			return 0, err
		}
		return fleet.LockIntent(ctx, tx, n.ID)
	})
	require.Equal(t, int64(2), rev, "enrollment is the first")
	_, err := do(t, d, func(ctx context.Context, tx db.Tx) (fleet.Node, error) { return fleet.Get(ctx, tx, "no-id") })
	require.Equal(t, "node_not_found", codeOf(t, err))
}

func TestSilenceIsToldOnceAndEndsWithTheNextWord(t *testing.T) {
	d := dbtest.New(t)
	n := node(t, d)
	c, err := connect(t, d, n.ID, &protocol.Hello{}, 0, now)
	require.NoError(t, err)
	require.True(t, c.WasUnreachable, "the first contact")
	silent := func(at time.Time) []string {
		return must(t, d, func(ctx context.Context, tx db.Tx) ([]string, error) { return fleet.Silent(ctx, tx, at) })
	}
	tell := func(at time.Time) bool {
		return must(t, d, func(ctx context.Context, tx db.Tx) (bool, error) {
			return fleet.SetUnreachable(ctx, tx, n.ID, at)
		})
	}
	require.Empty(t, silent(now.Add(fleet.OnlineWindow-1)))
	require.Equal(t, []string{n.ID}, silent(now.Add(fleet.OnlineWindow)))
	require.True(t, tell(now.Add(fleet.OnlineWindow)))
	require.False(t, tell(now.Add(fleet.OnlineWindow)))
	require.Empty(t, silent(now.Add(time.Hour)))

	back := must(t, d, func(ctx context.Context, tx db.Tx) (fleet.ReportResult, error) {
		return fleet.ApplyReport(ctx, tx, fleet.Report{NodeID: n.ID, SessionNo: 1, Counter: 1}, now.Add(time.Hour))
	})
	require.Equal(t, fleet.ReportResult{Fresh: true, WasUnreachable: true}, back)
	must(t, d, func(ctx context.Context, tx db.Tx) (bool, error) {
		return fleet.Disconnect(ctx, tx, n.ID, 1, now.Add(time.Hour))
	})
	require.Empty(t, silent(now.Add(time.Hour+fleet.ReconnectGrace-1)), "an agent's restart is no outage")
	require.Len(t, silent(now.Add(time.Hour+fleet.ReconnectGrace)), 1)
}
