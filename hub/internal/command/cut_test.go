package command_test

import (
	"maps"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/commandtest"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest/wire"
)

// behind makes a world whose hub reaches PostgreSQL through a proxy.
func behind(t *testing.T, options ...wire.Option) (*world, *wire.Proxy) {
	t.Helper()
	d, p := wire.Open(t, dbtest.PrivateURL(t), options...)
	return &world{commandtest.In(t, d)}, p
}

// The caller of a command whose commit got no answer sends it again with its key, and has one instance and one hold.
func TestLaw08ACreationWhoseCommitGotNoAnswerIsDoneOnce(t *testing.T) {
	for name, cut := range map[string]func(*wire.Proxy){
		"cut before the server":          func(p *wire.Proxy) { p.CutBefore("COMMIT") },
		"cut after the server committed": (*wire.Proxy).CutAfterCommit,
	} {
		t.Run(name, func(t *testing.T) { createdOnce(t, cut) })
	}
	for name, answer := range map[string]func(*wire.Proxy){
		"not committed": func(p *wire.Proxy) { p.AnswerCommit(wire.Ambiguous(), false) },
		"committed":     func(p *wire.Proxy) { p.AnswerCommit(wire.Ambiguous(), true) },
	} {
		t.Run("CockroachDB's stand-in answers 40003/"+name, func(t *testing.T) { createdOnce(t, answer, wire.Cockroach()) })
	}
}

func createdOnce(t *testing.T, breaks func(*wire.Proxy), options ...wire.Option) {
	t.Helper()
	w, p := behind(t, options...)
	w.Allocation()
	available, held := w.Wallet()
	m := w.Meta("create")
	breaks(p)
	_, err := w.Commands().CreateInstance(t.Context(), m, w.InstanceInput())
	require.ErrorIs(t, err, db.ErrAmbiguousCommit)
	require.Zero(t, p.Pending())
	first, err := w.Commands().CreateInstance(t.Context(), m, w.InstanceInput())
	require.NoError(t, err)
	again, err := w.Commands().CreateInstance(t.Context(), m, w.InstanceInput())
	require.NoError(t, err)
	require.Equal(t, first.ID, again.ID)
	require.Equal(t, 1, w.Count(`SELECT count(*) FROM app_instances`))
	require.Equal(t, 1, w.Count(`SELECT count(*) FROM holds JOIN subjects s ON s.id = subject_id WHERE kind = 'member'`),
		"one hold beside the allocation's")
	nowAvailable, nowHeld := w.Wallet()
	require.Positive(t, nowHeld)
	require.Equal(t, available+held, nowAvailable+nowHeld)
	require.Zero(t, w.Count(unbalanced))
}

// unbalanced counts the postings whose entries do not sum to zero.
const unbalanced = `SELECT count(*) FROM (SELECT 1 FROM entries GROUP BY posting_id, currency
	HAVING sum(amount_nanos) <> 0) x`

// restarted is what CockroachDB asks for at a chosen place, by the name of the place.
func restarted() map[string]func(*wire.Proxy) {
	return map[string]func(*wire.Proxy){
		"a read":  func(p *wire.Proxy) { p.Answer("SELECT", wire.ReadRestart(), 2) },
		"a write": func(p *wire.Proxy) { p.Answer("INSERT", wire.WriteTooOld(), 2) },
		"commit":  func(p *wire.Proxy) { p.AnswerCommit(wire.RetrySerializable(), false) },
		"an abort": func(p *wire.Proxy) {
			p.Answer("INSERT", wire.Aborted(), 1)
			p.AnswerCommit(wire.Aborted(), false)
		},
	}
}

// Each restart that CockroachDB asks for leaves the effects of the last attempt alone.
func TestLaw08ACreationThatCockroachDBRestartsIsDoneOnce(t *testing.T) {
	for name, breaks := range restarted() {
		t.Run(name, func(t *testing.T) {
			w, p := behind(t, wire.Cockroach())
			require.Equal(t, db.CockroachDB, w.DB.Engine())
			w.Allocation()
			breaks(p)
			attempts := 0
			around := func(tx db.Tx, body func(db.Tx) error) error {
				attempts++
				return body(tx)
			}
			_, err := w.Commands().WithAround(around).CreateInstance(t.Context(), w.Meta("create"), w.InstanceInput())
			require.NoError(t, err)
			require.Zero(t, p.Pending())
			require.Greater(t, attempts, 1)
			require.Equal(t, 1, w.Count(`SELECT count(*) FROM app_instances`))
			require.Equal(t, 1, w.Count(`SELECT count(*) FROM events WHERE type = 'apps.instance.requested'`))
		})
	}
}

// TestLaw08EveryCommandIsDoneOnceWhenItsCommitGetsNoAnswer walks all commands: where the commit did not reach the
// server, nothing was done; where it did, the same request again changes nothing more.
func TestLaw08EveryCommandIsDoneOnceWhenItsCommitGetsNoAnswer(t *testing.T) {
	before := proof
	t.Cleanup(func() { proof = before })
	all := law08()
	for engine, p := range map[string]func(*testing.T, atomicStep, []string){
		"postgresql": func(t *testing.T, s atomicStep, _ []string) {
			w, p := behind(t)
			doneOnce(t, w, s, p, []func(){func() { p.CutBefore("COMMIT") }}, []func(){p.CutAfterCommit})
		},
		"cockroachdb's stand-in": func(t *testing.T, s atomicStep, _ []string) {
			w, p := behind(t, wire.Cockroach())
			again := func() { p.AnswerCommit(wire.RetrySerializable(), false) }
			doneOnce(t, w, s, p, []func(){again, func() { p.AnswerCommit(wire.Ambiguous(), false) }},
				[]func(){again, func() { p.AnswerCommit(wire.Ambiguous(), true) }})
		},
	} {
		t.Run(engine, func(t *testing.T) {
			proof = p
			for _, name := range slices.Sorted(maps.Keys(all)) {
				t.Run(name, all[name])
			}
		})
	}
}

// doneOnce makes a change three times: its commit gets no answer and was lost, gets none and was done, and gets one.
// lost and done are what happens to the commit of each attempt of the transaction.
func doneOnce(t *testing.T, w *world, s atomicStep, p *wire.Proxy, lost, done []func()) {
	t.Helper()
	change := s.prepare(w)
	before := w.Contents()
	broken := func(commits []func()) error {
		attempts := 0
		err := change(func(tx db.Tx, body func(db.Tx) error) error {
			err := body(tx)
			if err == nil && attempts < len(commits) {
				commits[attempts]()
			}
			attempts++
			return err
		})
		require.Equal(t, len(commits), attempts, "no attempt more than the database asked for")
		require.Zero(t, p.Pending())
		return err
	}
	require.ErrorIs(t, broken(lost), db.ErrAmbiguousCommit)
	require.Equal(t, before, w.Contents(), "a commit that was lost changes nothing")
	require.ErrorIs(t, broken(done), db.ErrAmbiguousCommit)
	after := w.Contents()
	require.NotEqual(t, before[s.table], after[s.table])
	_ = change(func(tx db.Tx, body func(db.Tx) error) error { return body(tx) }) // the answer may be that it is done
	again := w.Contents()
	require.NotEqual(t, slices.Contains(repeated(), s.name), maps.Equal(after, again),
		"the same again changes nothing more")
	for _, table := range []string{"entries", "holds", "leases", "postings", "wallets"} {
		require.Equal(t, after[table], again[table], table)
	}
}

// repeated are the changes that have no idempotency key: a PUT or PATCH sets the same with another event; a login,
// its start, a token or a password is another one; a stream, a failure and a second use of a wrapping token are
// recorded each time.
func repeated() []string {
	return []string{
		"audit failure", "audit stream", "change instance", "forget environment", "login", "mint token",
		"put entitlement", "put package index", "put quota", "put SSH keys", "recover admin", "set admin password",
		"start browser login", "start device login", "unwrap",
	}
}
