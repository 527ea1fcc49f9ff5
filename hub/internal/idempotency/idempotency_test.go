package idempotency_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/db/dbtest"
	"github.com/gpuaas/gpuaas/hub/internal/idempotency"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/hub/internal/secret"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

type answer struct {
	ID     string
	Secret string
}

func request(key, body string) idempotency.Request {
	sum := sha256.Sum256([]byte(body))
	return idempotency.Request{
		Caller: principal.Actor{Type: principal.User, ID: "0192f0c0-0000-7000-8000-000000000001"},
		Route:  "POST /things", Key: key, BodyMAC: sum[:], Now: time.Unix(1_800_000_000, 0).UTC(),
	}
}

func once(ctx context.Context, d *db.DB, r idempotency.Request, fn func() (answer, error)) (answer, error) {
	return db.RunTx(ctx, d, func(tx db.Tx) (answer, error) { return idempotency.Do(ctx, tx, r, idempotency.Plain{}, fn) })
}

func TestSameKeyGivesTheFirstAnswerAgainWithoutASecondEffect(t *testing.T) {
	d := dbtest.New(t)
	effects, replays := 0, 0
	m := request("k", "body")
	m.OnReplay = func() { replays++ }
	do := func() (answer, error) { effects++; return answer{ID: db.NewID()}, nil }

	first, err := once(t.Context(), d, m, do)
	require.NoError(t, err)
	require.Zero(t, replays)
	m.Now = m.Now.Add(idempotency.Window)
	second, err := once(t.Context(), d, m, do)
	require.NoError(t, err)
	require.Equal(t, first, second)
	require.Equal(t, 1, effects)
	require.Equal(t, 1, replays)
}

func TestKeyIsOneForEachRouteAndCaller(t *testing.T) {
	d := dbtest.New(t)
	effects := 0
	do := func() (answer, error) { effects++; return answer{}, nil }
	mine := request("k", "body")
	otherRoute, otherCaller, noKey := mine, mine, mine
	otherRoute.Route = "POST /others"
	otherCaller.Caller.ID = "0192f0c0-0000-7000-8000-000000000002"
	noKey.Key = ""
	for _, m := range []idempotency.Request{mine, otherRoute, otherCaller, noKey, noKey} {
		_, err := once(t.Context(), d, m, do)
		require.NoError(t, err)
	}
	require.Equal(t, 5, effects)
}

func TestSameKeyWithAnotherBodyIsRefused(t *testing.T) {
	d := dbtest.New(t)
	do := func() (answer, error) { return answer{}, nil }
	_, err := once(t.Context(), d, request("k", "one"), do)
	require.NoError(t, err)
	_, err = once(t.Context(), d, request("k", "two"), func() (answer, error) {
		t.Error("the effect of a refused request happened")
		return answer{}, nil
	})
	require.True(t, fault.Is(err, fault.Unprocessable), err)
	require.Equal(t, "header/X-Idempotency-Key", fault.As(err).Fields[0].Pointer)
}

func TestFailureKeepsTheKeyFree(t *testing.T) {
	d := dbtest.New(t)
	_, err := once(t.Context(), d, request("k", "body"), func() (answer, error) { return answer{}, errors.New("no room") })
	require.Error(t, err)
	got, err := once(t.Context(), d, request("k", "another body"), func() (answer, error) {
		return answer{ID: "made"}, nil
	})
	require.NoError(t, err)
	require.Equal(t, "made", got.ID)
}

func TestDuplicatesInFlightHaveOneEffect(t *testing.T) {
	d := dbtest.New(t)
	const callers = 8
	var committed atomic.Int64
	answers := make([]answer, callers)
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() {
			m := request("k", "body")
			replayed := false
			m.OnReplay = func() { replayed = true }
			got, err := once(t.Context(), d, m, func() (answer, error) { return answer{ID: db.NewID()}, nil })
			if err != nil {
				t.Error(err)
			}
			if !replayed {
				committed.Add(1)
			}
			answers[i] = got
		})
	}
	wg.Wait()
	require.EqualValues(t, 1, committed.Load())
	for _, a := range answers {
		require.Equal(t, answers[0], a)
	}
}

func TestOldKeysAreFreeAgainAndPurged(t *testing.T) {
	d := dbtest.New(t)
	effects := 0
	do := func() (answer, error) { effects++; return answer{}, nil }
	m := request("k", "body")
	_, err := once(t.Context(), d, m, do)
	require.NoError(t, err)

	late := request("k", "another body")
	late.Now = m.Now.Add(idempotency.Window + time.Second)
	_, err = once(t.Context(), d, late, do)
	require.NoError(t, err)
	require.Equal(t, 2, effects)

	n, err := idempotency.Purge(t.Context(), d, late.Now.Add(idempotency.Window))
	require.NoError(t, err)
	require.Zero(t, n)
	n, err = idempotency.Purge(t.Context(), d, late.Now.Add(idempotency.Window+time.Second))
	require.NoError(t, err)
	require.EqualValues(t, 1, n)
}

func TestLaw11ShownOnceSecretIsReplayedFromSealedStorage(t *testing.T) {
	d := dbtest.New(t)
	ctx := t.Context()
	kek, err := secret.NewKEK(make([]byte, 32))
	require.NoError(t, err)
	sealer := secret.NewSealer(kek)
	do := func() (answer, error) {
		return db.RunTx(ctx, d, func(tx db.Tx) (answer, error) {
			return idempotency.Do(ctx, tx, request("k", "body"), sealer, func() (answer, error) {
				return answer{ID: db.NewID(), Secret: "shown-once"}, nil
			})
		})
	}
	first, err := do()
	require.NoError(t, err)
	second, err := do()
	require.NoError(t, err)
	require.Equal(t, first, second)

	stored, err := db.ReadTx(ctx, d, func(tx db.Tx) (out []byte, err error) {
		err = tx.QueryRow(ctx, `SELECT response FROM idempotency`).Scan(&out)
		return out, err
	})
	require.NoError(t, err)
	require.NotContains(t, string(stored), "shown-once")
}
