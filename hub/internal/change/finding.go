package change

import (
	"cmp"
	"context"
	"log/slog"
	"strings"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/finding"
)

// ActionAdopt is the audit action of findings and of what a restored hub adopts from its nodes.
const ActionAdopt = "hub.recovery.adopt"

// maxFindingBytes bounds the text of a finding; a longer one is cut.
const maxFindingBytes = 1024

// AddFinding stores a finding, with its event and audit row where it is news.
func AddFinding(ctx context.Context, tx db.Tx, f finding.Finding) error {
	f.Detail = strings.ToValidUTF8(f.Detail[:min(len(f.Detail), maxFindingBytes)], "")
	news, err := finding.Add(ctx, tx, f)
	if err != nil || !news {
		return err
	}
	e := findingEntry("hub.recovery.finding", f)
	e.Data["detail"] = f.Detail
	return Record(ctx, tx, BySystem(f.NodeID, f.At), e)
}

// ResolveFinding ends a finding, with its event, once its row was processed.
func ResolveFinding(ctx context.Context, tx db.Tx, f finding.Finding) error {
	resolved, err := finding.Resolve(ctx, tx, f.NodeID, f.Kind, f.ResourceID)
	if err != nil || !resolved {
		return err
	}
	return Append(ctx, tx, BySystem(f.NodeID, f.At), findingEntry("hub.recovery.finding_resolved", f))
}

// ResolveOtherFindings ends a node's findings of a kind, with their events, except those about some resources.
func ResolveOtherFindings(ctx context.Context, tx db.Tx, nodeID, kind string, still []string, now time.Time) error {
	resolved, err := finding.ResolveOthers(ctx, tx, nodeID, kind, still)
	if err != nil {
		return err
	}
	return appendResolved(ctx, tx, resolved, now)
}

// resolveUnpaid resolves, with their events, the findings about an allocation or attachment that has ended, by the hub
// or by its tenant.
func resolveUnpaid(ctx context.Context, tx db.Tx, resourceID string, now time.Time) error {
	resolved, err := finding.ResolveUnpaid(ctx, tx, resourceID)
	if err != nil {
		return err
	}
	return appendResolved(ctx, tx, resolved, now)
}

func appendResolved(ctx context.Context, tx db.Tx, resolved []finding.Finding, now time.Time) error {
	for _, f := range resolved {
		if err := Append(ctx, tx, BySystem(f.NodeID, now), findingEntry("hub.recovery.finding_resolved", f)); err != nil {
			return err
		}
	}
	return nil
}

func findingEntry(eventType string, f finding.Finding) Entry {
	data := map[string]any{"node_id": f.NodeID, "kind": f.Kind, "resource_type": f.ResourceType}
	return Entry{
		Event:        eventType,
		Action:       ActionAdopt,
		ResourceType: f.ResourceType,
		ResourceID:   f.ResourceID,
		Reason:       f.Kind,
		Data:         data,
		After:        data,
	}
}

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
			f.At, f.Detail = now, cmp.Or(f.Detail, cause.Error())
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
		slog.String("node_id", f.NodeID), slog.String("resource_type", f.ResourceType),
		slog.String("resource_id", f.ResourceID), slog.Any("cause", cause), slog.Any("error", err))
	return err
}
