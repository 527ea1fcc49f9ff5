package command

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

const (
	// passPageRows bounds one listing of a periodic pass; the pass goes on until nothing is due.
	passPageRows = 500
	// passBatchRows bounds one transaction of a periodic pass, and so how long it holds an org's wallet.
	passBatchRows = 50
	// passOrgs is how many orgs' rows are processed at once; the rows of one share a wallet and go one after the other.
	passOrgs = 4
)

// pass is a periodic pass over rows, each of which is processed by itself in the end: a row that fails is set aside
// with a finding and holds up no other.
type pass[T any] struct {
	db  *db.DB
	log *slog.Logger
	now time.Time
	// list returns the rows that are due, in an order that starts after a given one; nil for the beginning.
	list func(ctx context.Context, tx db.Tx, after *T) ([]T, error)
	// anew: list begins each page anew, without the rows that were processed or set aside, and after is always nil.
	anew bool
	// org groups rows.
	org func(T) string
	// pageRows bounds one listing, batchRows one transaction; zero is passPageRows and passBatchRows.
	pageRows, batchRows int
	// process has no effect outside tx but on what T points to. committed follows it, from several goroutines; it may be
	// nil.
	process   func(ctx context.Context, tx db.Tx, row T) error
	committed func(T)
	// aside moves a row that failed out of list's answers for a while and names the finding.
	aside func(ctx context.Context, tx db.Tx, row T) (finding.Finding, error)
}

// run goes on until nothing is due. It returns the rows that were processed.
func (p pass[T]) run(ctx context.Context) ([]T, error) {
	p.pageRows = cmp.Or(p.pageRows, passPageRows)
	var (
		after *T
		done  []T
	)
	for {
		rows, err := db.Query(ctx, p.db, func(tx db.Tx) ([]T, error) { return p.list(ctx, tx, after) })
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

// passed is what became of rows: those that were processed, and how many were set aside.
type passed[T any] struct {
	done  []T
	aside int
}

func (p pass[T]) page(ctx context.Context, rows []T) (all passed[T], err error) {
	byOrg := map[string][]T{}
	for _, r := range rows {
		byOrg[p.org(r)] = append(byOrg[p.org(r)], r)
	}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(passOrgs)
	results := make(chan passed[T], len(byOrg))
	for _, mine := range byOrg {
		group.Go(func() error {
			out, err := p.rows(ctx, mine)
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

// rows processes the rows of one org in batches; one that fails falls apart into rows. It ends early only where passing
// says so.
func (p pass[T]) rows(ctx context.Context, rows []T) (out passed[T], err error) {
	for batch := range slices.Chunk(rows, cmp.Or(p.batchRows, passBatchRows)) {
		err := p.together(ctx, batch)
		if err == nil {
			out.done = append(out.done, batch...)
			continue
		}
		for n := range batch {
			if passing(ctx, err) {
				return out, err
			}
			if len(batch) > 1 {
				err = p.together(ctx, batch[n:n+1])
			}
			if err == nil {
				out.done = append(out.done, batch[n])
			} else if !passing(ctx, err) {
				if err = p.setAside(ctx, batch[n], err); err == nil {
					out.aside++
				}
			}
		}
		if passing(ctx, err) {
			return out, err
		}
	}
	return out, nil
}

// passing reports whether a failure is the database's or the process's and not the row's.
func passing(ctx context.Context, err error) bool {
	return err != nil && (ctx.Err() != nil || fault.Is(err, fault.Unavailable))
}

func (p pass[T]) together(ctx context.Context, rows []T) error {
	_, err := db.RunTx(ctx, p.db, func(tx db.Tx) (struct{}, error) {
		for _, r := range rows {
			if err := p.process(ctx, tx, r); err != nil {
				return struct{}{}, err
			}
		}
		return struct{}{}, nil
	})
	for _, r := range rows {
		if err == nil && p.committed != nil {
			p.committed(r)
		}
	}
	return err
}

func (p pass[T]) setAside(ctx context.Context, row T, cause error) error {
	return SetAside(ctx, p.db, p.log, cause, p.now, func(ctx context.Context, tx db.Tx) (finding.Finding, error) {
		return p.aside(ctx, tx, row)
	})
}

// maxFindingBytes bounds the text of a failure in a finding.
const maxFindingBytes = 1024

func cutText(s string) string { return strings.ToValidUTF8(s[:min(len(s), maxFindingBytes)], "") }

// SetAside records, in a transaction of its own, that a row could not be processed: move takes it out of the way and
// names the finding. Where even that fails, it is logged, and the other rows go on.
func SetAside(ctx context.Context, d *db.DB, log *slog.Logger, cause error, now time.Time,
	move func(ctx context.Context, tx db.Tx) (finding.Finding, error),
) error {
	return SetAllAside(ctx, d, log, cause, now, func(ctx context.Context, tx db.Tx) ([]finding.Finding, error) {
		f, err := move(ctx, tx)
		return []finding.Finding{f}, err
	})
}

// SetAllAside is SetAside for many rows of one owner. A finding without a detail has the cause as its detail; the log
// has the first finding.
func SetAllAside(ctx context.Context, d *db.DB, log *slog.Logger, cause error, now time.Time,
	move func(ctx context.Context, tx db.Tx) ([]finding.Finding, error),
) error {
	findings, err := db.RunTx(ctx, d, func(tx db.Tx) ([]finding.Finding, error) {
		findings, err := move(ctx, tx)
		if err != nil {
			return findings, err
		}
		for _, f := range findings {
			f.At, f.Detail = now, cutText(cmp.Or(f.Detail, cause.Error()))
			if err := AddFinding(ctx, tx, f); err != nil {
				return findings, err
			}
		}
		return findings, nil
	})
	f := finding.Finding{}
	if len(findings) > 0 {
		f = findings[0]
	}
	log.ErrorContext(ctx, "row set aside", slog.Int("rows", len(findings)), slog.String("kind", f.Kind),
		slog.String("node_id", f.NodeID),
		slog.String("resource_type", f.ResourceType), slog.String("resource_id", f.ResourceID), slog.Any("cause", cause),
		slog.Any("error", err))
	return err
}

// Resolve ends a finding, in the caller's transaction, once its row was processed.
func Resolve(ctx context.Context, tx db.Tx, f finding.Finding) error {
	gone, err := finding.Resolve(ctx, tx, f.NodeID, f.Kind, f.ResourceID)
	if err != nil || !gone {
		return err
	}
	return event.Append(ctx, tx, event.Event{
		Type: "hub.recovery.finding_resolved", Subject: f.ResourceID, ResourceVersion: 1, CorrelationID: f.NodeID,
		Data: map[string]any{"node_id": f.NodeID, "kind": f.Kind, "resource_type": f.ResourceType}, At: f.At,
	})
}
