package httpapi

import (
	"bufio"
	"cmp"
	"context"
	"iter"
	"log/slog"
	"net/http"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
)

// ListAudit lists the audit trail, the newest row first.
func (s *Server) ListAudit(ctx context.Context, r ListAuditRequestObject) (ListAuditResponseObject, error) {
	q := r.Params
	f, err := billingFilter(q.Cursor, q.Limit, q.From, q.To)
	if err != nil {
		return nil, err
	}
	items, next, err := page(q.Cursor, q.Limit, func(p db.Page) ([]event.AuditRow, error) {
		return s.Queries.Audit(ctx, principalOf(ctx), event.AuditQuery{
			OrgID: q.OrgID, ProjectID: q.ProjectID, ActorID: q.ActorID, Action: q.Action, ResourceType: q.ResourceType,
			ResourceID: q.ResourceID, CorrelationID: q.CorrelationID, Outcome: string(q.Outcome),
			From: f.From, To: f.To, Before: p.After, Limit: p.Limit,
		})
	}, func(row event.AuditRow) string { return row.ID })
	return ListAudit200JSONResponse{Items: views(items, auditView), NextCursor: next}, err
}

func auditView(r event.AuditRow) AuditRow {
	return AuditRow{
		ID: r.ID, At: r.At, Actor: AuditActor{Type: AuditActorType(r.Actor.Type), ID: r.Actor.ID}, Action: r.Action,
		Outcome: AuditOutcome(r.Outcome),
		Reason:  r.Reason, ResourceType: r.ResourceType, ResourceID: r.ResourceID, OrgID: r.OrgID, ProjectID: r.ProjectID,
		CorrelationID: r.CorrelationID, SourceAddress: r.SourceAddress, Before: r.Before, After: r.After,
		OnBehalfOf: AuditActor{Type: AuditActorType(r.OnBehalfOf.Type), ID: r.OnBehalfOf.ID},
		Number:     r.Number, PreviousHash: r.PreviousHash, Hash: r.Hash,
	}
}

// ExportAudit streams a range of a chain of the audit trail.
func (s *Server) ExportAudit(ctx context.Context, r ExportAuditRequestObject) (ExportAuditResponseObject, error) {
	rows, err := s.Queries.ExportAudit(ctx, principalOf(ctx), event.AuditRange{
		OrgID: r.Params.OrgID, After: max(r.Params.FromNumber, 1) - 1, To: r.Params.ToNumber,
		Since: r.Params.From, Until: r.Params.To,
	})
	return auditLines{rows, cmp.Or(s.Log, slog.New(slog.DiscardHandler))}, err
}

// auditLines are rows as JSON Lines.
type auditLines struct {
	rows iter.Seq2[event.AuditRow, error]
	log  *slog.Logger
}

// VisitExportAuditResponse makes it an answer of exportAudit. A row that cannot be read breaks the connection: an
// answer that only ended there would pass for whole.
func (l auditLines) VisitExportAuditResponse(w http.ResponseWriter) error {
	w.Header().Set("Content-Type", "application/jsonl")
	w.WriteHeader(http.StatusOK)
	out := bufio.NewWriterSize(newTransferWriter(w, transferTimeout), streamBytes)
	for row, err := range l.rows {
		var line []byte
		if err == nil {
			line, err = row.JSON()
		}
		if err != nil {
			l.log.Error("audit export broke off", slog.Any("error", err))
			panic(http.ErrAbortHandler)
		}
		if _, err := out.Write(append(line, '\n')); err != nil {
			return err
		}
	}
	return out.Flush()
}
