package periodic

import (
	"cmp"
	"context"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/gpuaas/gpuaas/hub/internal/change"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

const (
	// passPageRows bounds one listing of a pass; the pass goes on until nothing is due.
	passPageRows = 500
	// passBatchRows bounds one transaction of a pass, and so how long it locks an org's wallet.
	passBatchRows = 50
	// passOrgs is how many orgs' rows are processed at once; the rows of one share a wallet and go one after the other.
	passOrgs = 4
)

// pass processes rows in batches, and each row by itself where its batch fails: a row that fails alone is set aside
// with a finding and holds up no other.
type pass[T any] struct {
	Passes
	now time.Time
	// list returns the rows that are due, in an order that starts after a given one; nil for the beginning.
	list func(ctx context.Context, tx db.Tx, after *T) ([]T, error)
	// anew: list begins each page anew, without the rows that were processed or set aside, and after is always nil.
	anew bool
	// row is what the pass needs to know of a row.
	row func(T) ledger.Row
	// kind and resourceType are of the finding about a row that fails.
	kind, resourceType string
	// pageRows bounds one listing, batchRows one transaction; zero is passPageRows and passBatchRows.
	pageRows, batchRows int
	// process has no effect outside tx but on what T points to. It reports whether the row had been set aside. committed
	// follows it, from several goroutines; it may be nil.
	process   func(ctx context.Context, tx db.Tx, row T) (wasAside bool, err error)
	committed func(T)
	// setAside moves a row that failed out of list's answers for a while; nil is ledger.SetAside.
	setAside func(ctx context.Context, tx db.Tx, row T) error
}

func (p pass[T]) finding(row T) finding.Finding {
	r := p.row(row)
	return finding.Finding{NodeID: r.NodeID, Kind: p.kind, ResourceType: p.resourceType, ResourceID: r.ID, At: p.now}
}

// run goes on until nothing is due. It returns the rows that were processed.
func (p pass[T]) run(ctx context.Context) ([]T, error) {
	p.pageRows = cmp.Or(p.pageRows, passPageRows)
	var (
		after *T
		done  []T
	)
	for {
		rows, err := db.Query(ctx, p.DB, func(tx db.Tx) ([]T, error) { return p.list(ctx, tx, after) })
		if err != nil {
			return done, err
		}
		out, err := p.page(ctx, rows)
		done = append(done, out.done...)
		if err != nil || len(rows) < p.pageRows {
			return done, err
		}
		switch {
		case !p.anew:
			after = &rows[len(rows)-1]
		case len(out.done) == 0 && out.aside == 0:
			// The next page would be the same one.
			return done, nil
		}
	}
}

// passed is the result of a pass: the processed rows, and how many were set aside.
type passed[T any] struct {
	done  []T
	aside int
}

func (p pass[T]) page(ctx context.Context, rows []T) (all passed[T], err error) {
	byOrg := map[string][]T{}
	for _, r := range rows {
		org := p.row(r).OrgID
		byOrg[org] = append(byOrg[org], r)
	}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(passOrgs)
	results := make(chan passed[T], len(byOrg))
	for _, rows := range byOrg {
		group.Go(func() error {
			out, err := p.rows(ctx, rows)
			results <- out
			return err
		})
	}
	err = group.Wait()
	close(results)
	for out := range results {
		all.done = append(all.done, out.done...)
		all.aside += out.aside
	}
	return all, err
}

// rows processes the rows of one org in batches; one that fails is split into rows. It ends early only on a failure
// that is temporary.
func (p pass[T]) rows(ctx context.Context, rows []T) (out passed[T], err error) {
	for batch := range slices.Chunk(rows, cmp.Or(p.batchRows, passBatchRows)) {
		err := p.batch(ctx, batch)
		if err == nil {
			out.done = append(out.done, batch...)
			continue
		}
		for n := range batch {
			if isTemporary(ctx, err) {
				return out, err
			}
			if len(batch) > 1 {
				err = p.batch(ctx, batch[n:n+1])
			}
			if err == nil {
				out.done = append(out.done, batch[n])
			} else if !isTemporary(ctx, err) {
				if err = p.aside(ctx, batch[n], err); err == nil {
					out.aside++
				}
			}
		}
		if isTemporary(ctx, err) {
			return out, err
		}
	}
	return out, nil
}

// isTemporary reports whether a failure is the database's or the process's and not the row's.
func isTemporary(ctx context.Context, err error) bool {
	return err != nil && (ctx.Err() != nil || fault.Is(err, fault.Unavailable))
}

// batch processes rows in one transaction.
func (p pass[T]) batch(ctx context.Context, rows []T) error {
	err := db.WriteTx(ctx, p.DB, func(tx db.Tx) error {
		for _, r := range rows {
			wasAside, err := p.process(ctx, tx, r)
			if err == nil && wasAside {
				err = change.ResolveFinding(ctx, tx, p.finding(r))
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
	for _, r := range rows {
		if err == nil && p.committed != nil {
			p.committed(r)
		}
	}
	return err
}

func (p pass[T]) aside(ctx context.Context, row T, cause error) error {
	return change.SetAside(ctx, p.DB, p.Log, cause, p.now, func(ctx context.Context, tx db.Tx) (finding.Finding, error) {
		if p.setAside != nil {
			return p.finding(row), p.setAside(ctx, tx, row)
		}
		return p.finding(row), ledger.SetAside(ctx, tx, p.row(row).ID, p.now)
	})
}

// afterID lists rows from the one after an id on.
func afterID[T any](row func(T) ledger.Row, list func(ctx context.Context, tx db.Tx, after string) ([]T, error),
) func(context.Context, db.Tx, *T) ([]T, error) {
	return func(ctx context.Context, tx db.Tx, after *T) ([]T, error) {
		if after == nil {
			return list(ctx, tx, "")
		}
		return list(ctx, tx, row(*after).ID)
	}
}
