package ledger_test

import (
	"context"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/billing"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/protocol"
)

// TestLaw06EveryPostingSumsToZero refuses unbalanced postings where they are built.
func TestLaw06EveryPostingSumsToZero(t *testing.T) {
	leg := func(account, currency string, nanos int64) ledger.Leg {
		return ledger.Leg{Account: account, Currency: currency, Nanos: nanos}
	}
	for name, legs := range map[string][]ledger.Leg{
		"not zero":       {leg("a", "EUR", 1), leg("b", "EUR", -2)},
		"two currencies": {leg("a", "EUR", 1), leg("b", "USD", -1)},
		"one leg":        {leg("a", "EUR", 0)},
		"empty leg":      {leg("a", "EUR", 1), leg("b", "EUR", -1), leg("c", "EUR", 0)},
		"no account":     {leg("a", "EUR", 1), leg("", "EUR", -1)},
		"no currency":    {leg("a", "", 1), leg("b", "", -1)},
		"wraps around":   {leg("a", "EUR", 1<<62), leg("b", "EUR", 1<<62), leg("c", "EUR", 1<<62), leg("d", "EUR", 1<<62)},
		"none":           nil,
	} {
		_, err := ledger.NewPosting("k", legs...)
		require.Error(t, err, name)
	}
	_, err := ledger.NewPosting("", ledger.Leg{Account: "a", Currency: "EUR", Nanos: 1},
		ledger.Leg{Account: "b", Currency: "EUR", Nanos: -1})
	require.Error(t, err)
	p, err := ledger.NewPosting("k", ledger.Leg{Account: "a", Currency: "EUR", Nanos: 3},
		ledger.Leg{Account: "b", Currency: "EUR", Nanos: -2}, ledger.Leg{Account: "c", Currency: "EUR", Nanos: -1})
	require.NoError(t, err)
	require.NotEmpty(t, p.ID)
}

// TestLaw06PostedRowsNeverChange reads every SQL statement of the hub: none updates or deletes a row of the journal, of
// usage, of suspense or of the price book, but that records in suspense and raw usage have a retention.
func TestLaw06PostedRowsNeverChange(t *testing.T) {
	change := regexp.MustCompile(
		`(?is)\b(UPDATE|DELETE\s+FROM|TRUNCATE(\s+TABLE)?)\s+(ONLY\s+)?"?(postings|entries|usage_records_\d?|` +
			`suspense_records|prices)\b`)
	upsert := regexp.MustCompile(
		"(?is)INSERT\\s+INTO\\s+(postings|entries|usage_records_\\d?|suspense_records|prices)\\b[^`]*DO\\s+UPDATE")
	seen := 0
	require.NoError(t, filepath.WalkDir("../..", func(path string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() || strings.HasSuffix(path, "_test.go") || !slices.Contains([]string{".go", ".sql"},
			filepath.Ext(path)) {
			return err
		}
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		var allowed []string
		switch path {
		case filepath.Join("..", "..", "internal", "ledger", "retention.go"):
			allowed = []string{"DELETE FROM suspense_records"}
		case filepath.Join("..", "..", "internal", "ledger", "slot.go"):
			allowed = []string{"TRUNCATE TABLE usage_records_"}
		}
		require.Equal(t, allowed, change.FindAllString(string(text), -1), path)
		require.Empty(t, upsert.FindString(string(text)), path)
		seen++
		return nil
	}))
	require.Greater(t, seen, 20)
}

// TestLaw06RowsAreTheSameAfterMoreIsPosted compares all earlier rows of the books after later work.
func TestLaw06RowsAreTheSameAfterMoreIsPosted(t *testing.T) {
	w := newWorld(t)
	priced(w)
	st := streams(w, rand.New(rand.NewPCG(9, 9)), 2)
	w.now = noon.Add(23 * time.Hour)
	for _, s := range st {
		w.post(s.segments[0]...)
	}
	rows := func(until time.Time) []string {
		return query(w,
			`SELECT p.id::text || p.key || p.kind || p.created_at::text || e.leg::text || e.account || e.amount_nanos::text
			FROM postings p JOIN entries e ON e.posting_id = p.id WHERE p.created_at <= $1 ORDER BY p.id, e.leg`,
			func(scan func(...any) error) (s string, err error) {
				err = scan(&s)
				return s, err
			}, until)
	}
	first := w.now
	before := rows(first)
	w.now = w.now.Add(time.Minute)
	for _, s := range st {
		for _, seg := range s.segments {
			w.post(seg...)
		}
		w.close(s.subject, w.now)
		w.post(w.final(s.subject, 80_000))
	}
	require.Equal(t, before, rows(first))
	require.Greater(t, len(rows(w.now)), len(before))
	require.Zero(t, number(w, `SELECT count(*) FROM subjects WHERE settled_at IS NULL`))
	_, held := w.wallet()
	require.Equal(t, "0", held)
	w.checkBill()
}

// TestLaw06AKeyPostsOnce lets the database itself refuse the second posting under one key.
func TestLaw06AKeyPostsOnce(t *testing.T) {
	w := newWorld(t)
	grant := func() error {
		return do(w, func(ctx context.Context, tx db.Tx) error {
			_, err := ledger.GrantCredit(ctx, tx, ledger.Grant{
				OrgID: w.org, Currency: "EUR", Nanos: 5, Description: "d",
				Key: "same",
			}, w.now)
			return err
		})
	}
	require.NoError(t, grant())
	require.True(t, db.IsUniqueViolation(grant()))
	available, _ := w.wallet()
	require.Equal(t, "0.000000005", available)
	w.checkInvariants()
}

// TestLaw07UsageNeverTakesAWalletBelowZero lets nodes report far more than was held, and members open at once against a
// wallet that covers one: no account of a tenant goes below zero, and what is not paid is written off in the open.
func TestLaw07UsageNeverTakesAWalletBelowZero(t *testing.T) {
	w := newWorld(t)
	w.credit("5")
	w.price(ledger.Price{Meter: protocol.MeterCPUSeconds, HostBasisPoints: 5000}, "36")
	s := w.subject(ledger.Member) // its limit is unknown: nothing is held for processor time
	s, err := w.open(s)
	require.NoError(t, err)
	w.lease(s, time.Hour)
	w.now = at(1000)
	w.post(record(1, s, protocol.MeterCPUSeconds, 0, 1000, 1_000_000_000))
	available, held := w.wallet()
	require.Equal(t, "5", available)
	require.Equal(t, "0", held)
	require.Equal(t, map[string]string{
		"platform:credit": "-5", "wallet:" + w.org: "5", "platform:revenue": "10", "platform:write_off": "-10",
	}, w.accounts(), "the host has no share of what nobody paid")
	w.checkBill()
}

// TestLaw07LateUsageIsWrittenOff: the hold is gone, the wallet is not touched.
func TestLaw07LateUsageIsWrittenOff(t *testing.T) {
	w := newWorld(t)
	w.credit("100")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds, HostBasisPoints: 7000}, "3.6")
	s := w.member()
	w.lease(s, time.Hour)
	w.now = at(3600)
	w.close(s, at(1800))
	w.now = noon.Add(time.Hour + billing.StaleAfter)
	require.Zero(t, w.settle(), "not yet")
	w.now = w.now.Add(time.Second)
	require.Equal(t, 1, w.settle())
	require.Zero(t, w.settle())
	available, _ := w.wallet()
	require.Equal(t, "100", available)

	w.post(w.session(s, 0, 100))
	require.Equal(t, "0.1", w.accounts()["platform:revenue"])
	require.Equal(t, "-0.1", w.accounts()["platform:write_off"])
	available, _ = w.wallet()
	require.Equal(t, "100", available)
	w.checkBill()
}

// TestLaw07ConcurrentHoldsNeverOverdraw opens many leases at once against one wallet.
func TestLaw07ConcurrentHoldsNeverOverdraw(t *testing.T) {
	w := newWorld(t)
	w.credit("10")
	w.price(ledger.Price{Meter: protocol.MeterSessionSeconds}, "3.6")
	var members []ledger.Subject
	for range 8 {
		members = append(members, w.member())
	}
	granted := make(chan bool, len(members))
	var wg sync.WaitGroup
	for _, s := range members {
		wg.Go(func() {
			_, err := db.RunTx(t.Context(), w.d, func(tx db.Tx) (*protocol.Lease, error) {
				return ledger.IssueLease(t.Context(), tx, ledger.LeaseRequest{
					SubjectID: s.ID, NodeID: s.NodeID, Now: w.now,
					Duration: 50 * time.Minute,
				})
			})
			if code := faultCode(err); code != "" && code != "insufficient_funds" {
				t.Error(err)
			}
			granted <- err == nil
		})
	}
	wg.Wait()
	close(granted)
	n := 0
	for ok := range granted {
		if ok {
			n++
		}
	}
	// Two full leases at 3.6, and a shortened one from what is left.
	require.Equal(t, 3, n)
	w.checkInvariants()
}
