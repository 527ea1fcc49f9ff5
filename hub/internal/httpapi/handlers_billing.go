package httpapi

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// ListUsage lists measured usage, the newest first.
func (s *Server) ListUsage(ctx context.Context, r ListUsageRequestObject) (ListUsageResponseObject, error) {
	q := r.Params
	f, err := billingFilter(q.Cursor, q.Limit, q.From, q.To)
	if err != nil {
		return nil, err
	}
	f.AppInstanceID, f.UsageSource, f.Meter = q.AppInstanceID, string(q.UsageSource), q.Meter
	list, err := db.ReadTx(ctx, s.Queries.DB, func(tx db.Tx) (UsageRecordList, error) {
		if f.OrgID, f.ProjectID, err = billingScope(ctx, tx, iam.UsageRead, q.OrgID, q.ProjectID); err != nil {
			return UsageRecordList{}, err
		}
		rows, next, err := ledger.ListUsage(ctx, tx, f)
		out := UsageRecordList{Items: make([]UsageRecord, len(rows)), NextCursor: next}
		for i, u := range rows {
			out.Items[i] = usageView(u)
		}
		return out, err
	})
	if err != nil {
		return nil, err
	}
	return ListUsage200JSONResponse(list), nil
}

// hourlyWindow is how far back hours are listed where the caller does not say.
const hourlyWindow = 31 * 24 * time.Hour

// ListHourlyUsage lists usage by hours, the newest first.
func (s *Server) ListHourlyUsage(ctx context.Context,
	r ListHourlyUsageRequestObject,
) (ListHourlyUsageResponseObject, error) {
	q := r.Params
	f, err := billingFilter("", q.Limit, q.From, q.To)
	if err != nil {
		return nil, err
	}
	if f.From.IsZero() {
		f.From = metaFrom(ctx).Now.Add(-hourlyWindow)
	}
	f.Before, f.AppInstanceID, f.Meter = q.Cursor, q.AppInstanceID, q.Meter
	list, err := db.ReadTx(ctx, s.Queries.DB, func(tx db.Tx) (UsageHourList, error) {
		if f.OrgID, f.ProjectID, err = billingScope(ctx, tx, iam.UsageRead, q.OrgID, q.ProjectID); err != nil {
			return UsageHourList{}, err
		}
		rows, next, err := ledger.ListHours(ctx, tx, f)
		out := UsageHourList{Items: make([]UsageHour, len(rows)), NextCursor: next}
		for i, h := range rows {
			out.Items[i] = hourView(h)
		}
		return out, err
	})
	if err != nil {
		return nil, err
	}
	return ListHourlyUsage200JSONResponse(list), nil
}

// ListLedger lists the journal, the newest first.
func (s *Server) ListLedger(ctx context.Context, r ListLedgerRequestObject) (ListLedgerResponseObject, error) {
	q := r.Params
	f, err := billingFilter(q.Cursor, q.Limit, q.From, q.To)
	if err != nil {
		return nil, err
	}
	f.AppInstanceID, f.Kind = q.AppInstanceID, string(q.Kind)
	list, err := db.ReadTx(ctx, s.Queries.DB, func(tx db.Tx) (PostingList, error) {
		if f.OrgID, f.ProjectID, err = billingScope(ctx, tx, iam.LedgerRead, q.OrgID, q.ProjectID); err != nil {
			return PostingList{}, err
		}
		rows, next, err := ledger.ListPostings(ctx, tx, f)
		out := PostingList{Items: make([]Posting, len(rows)), NextCursor: next}
		for i, p := range rows {
			out.Items[i] = postingView(p)
		}
		return out, err
	})
	if err != nil {
		return nil, err
	}
	return ListLedger200JSONResponse(list), nil
}

// EstimateCost prices an app before it is launched.
func (s *Server) EstimateCost(ctx context.Context, r EstimateCostRequestObject) (EstimateCostResponseObject, error) {
	out, err := db.ReadTx(ctx, s.Queries.DB, func(tx db.Tx) (CostEstimate, error) {
		project, err := iam.InProject(ctx, tx, principalOf(ctx), iam.PriceRead, r.ProjectID)
		if err != nil {
			return CostEstimate{}, err
		}
		member := ledger.Subject{Kind: ledger.Member, OrgID: project.OrgID, ProjectID: project.ID, AppSlug: r.AppSlug}
		app, err := catalog.GetApp(ctx, tx, r.AppSlug)
		if err != nil {
			return CostEstimate{}, err
		}
		if !app.VisibleTo(project.OrgID) {
			// The very words of an app that is not there.
			return CostEstimate{}, fault.New(fault.NotFound, "not_found", "There is no such resource.", nil)
		}
		version, err := catalog.GetVersion(ctx, tx, r.AppSlug, r.Version)
		if err != nil {
			return CostEstimate{}, err
		}
		if version.Status == catalog.Draft && !seesDrafts(principalOf(ctx), app) {
			return CostEstimate{}, iam.ErrNotFound()
		}
		if r.Params.AllocationID != "" {
			allocation, err := capacity.Get(ctx, tx, project.ID, r.Params.AllocationID)
			if err != nil {
				return CostEstimate{}, err
			}
			member.SKU = allocation.SKU
		}
		size := version.Manifest.Version.RuntimeProfile.Resources
		member.CPUMillis, member.MemoryBytes = int64(size.CPUMillis.Default), int64(size.MemoryMiB.Default)<<20
		e, err := ledger.EstimateMember(ctx, tx, member, metaFrom(ctx).Now)
		if err != nil {
			return CostEstimate{}, err
		}
		view := CostEstimate{
			Currency: e.Currency, PerHour: ledger.FormatNanos(e.PerHourNanos), Rates: []CostRate{}, CPUMillis: member.CPUMillis,
			MemoryBytes: member.MemoryBytes,
		}
		for _, rate := range e.Rates {
			view.Rates = append(view.Rates, CostRate{
				Meter: rate.Meter, PriceID: rate.PriceID,
				PerHour: ledger.FormatNanos(rate.PerHourNanos),
			})
		}
		return view, nil
	})
	if err != nil {
		return nil, err
	}
	return EstimateCost200JSONResponse(out), nil
}

// GetWallet says what the org can still spend and what is held.
func (s *Server) GetWallet(ctx context.Context, r GetWalletRequestObject) (GetWalletResponseObject, error) {
	p := principalOf(ctx)
	orgID := r.Params.OrgID
	if orgID == "" {
		orgID = p.OrgID
	}
	if orgID == "" {
		return nil, fault.New(fault.Unprocessable, "org_required", "You belong to no org; say whose wallet you want.",
			nil).WithField("query/org_id", "is required")
	}
	if err := iam.Authorize(p, iam.WalletRead, orgID, ""); err != nil {
		return nil, err
	}
	out, err := db.ReadTx(ctx, s.Queries.DB, func(tx db.Tx) (Wallet, error) {
		org, err := iam.GetOrg(ctx, tx, orgID)
		if err != nil {
			return Wallet{}, err
		}
		balances, err := ledger.Wallet(ctx, tx, org.ID)
		out := Wallet{OrgID: org.ID, Balances: make([]WalletBalance, len(balances))}
		for i, b := range balances {
			out.Balances[i] = WalletBalance{
				Currency: b.Currency, Available: ledger.FormatNanos(b.AvailableNanos),
				Held: ledger.FormatNanos(b.HeldNanos),
			}
		}
		return out, err
	})
	if err != nil {
		return nil, err
	}
	return GetWallet200JSONResponse(out), nil
}

// GrantCredit puts money into an org's wallet.
func (s *Server) GrantCredit(ctx context.Context, r GrantCreditRequestObject) (GrantCreditResponseObject, error) {
	nanos, err := amountOf(r.Body.Amount, "/amount")
	if err != nil {
		return nil, err
	}
	p, err := s.Commands.GrantCredit(ctx, metaFrom(ctx), command.GrantCreditInput{
		OrgID: r.Body.OrgID, Currency: r.Body.Currency, Nanos: nanos, Description: r.Body.Description,
	})
	if err != nil {
		return nil, err
	}
	return GrantCredit201JSONResponse(postingView(p)), nil
}

// ListPrices lists the price book, the newest row first.
func (s *Server) ListPrices(ctx context.Context, r ListPricesRequestObject) (ListPricesResponseObject, error) {
	if err := iam.Authorize(principalOf(ctx), iam.PriceRead, "", ""); err != nil {
		return nil, err
	}
	before, err := cursorID(r.Params.Cursor)
	if err != nil {
		return nil, err
	}
	list, err := db.ReadTx(ctx, s.Queries.DB, func(tx db.Tx) (PriceList, error) {
		rows, next, err := ledger.ListPrices(ctx, tx, r.Params.Meter, before, limitOf(r.Params.Limit))
		out := PriceList{Items: make([]Price, len(rows)), NextCursor: next}
		for i, p := range rows {
			out.Items[i] = priceView(p)
		}
		return out, err
	})
	if err != nil {
		return nil, err
	}
	return ListPrices200JSONResponse(list), nil
}

// CreatePrice adds a row to the price book.
func (s *Server) CreatePrice(ctx context.Context, r CreatePriceRequestObject) (CreatePriceResponseObject, error) {
	nanos, err := amountOf(r.Body.Price, "/price")
	if err != nil {
		return nil, err
	}
	p, err := s.Commands.CreatePrice(ctx, metaFrom(ctx), ledger.Price{
		Meter: r.Body.Meter, AppSlug: r.Body.AppSlug, SKU: r.Body.Sku, Currency: r.Body.Currency, Nanos: nanos,
		Per:             string(r.Body.Per),
		HostBasisPoints: int64(r.Body.HostSharePercent) * 100, From: r.Body.From,
	})
	if err != nil {
		return nil, err
	}
	return CreatePrice201JSONResponse(priceView(p)), nil
}

// billingScope decides whose bills the caller sees: a project's, the own org's, or, for a platform admin who names
// none, all. A service account sees its project's.
func billingScope(ctx context.Context, tx db.Tx, permission iam.Permission, orgID,
	projectID string,
) (org, project string, err error) {
	p := principalOf(ctx)
	if projectID == "" && p.Type == iam.TypeServiceAccount {
		projectID = p.ProjectID
	}
	if projectID != "" {
		in, err := iam.InProject(ctx, tx, p, permission, projectID)
		if err != nil {
			return "", "", err
		}
		if orgID != "" && orgID != in.OrgID {
			return "", "", iam.ErrNotFound()
		}
		return in.OrgID, in.ID, nil
	}
	if orgID == "" && p.PlatformAdmin {
		return "", "", iam.Authorize(p, permission, "", "")
	}
	if orgID == "" {
		orgID = p.OrgID
	}
	if orgID == "" {
		return "", "", iam.ErrNotFound()
	}
	if err := iam.Authorize(p, permission, orgID, ""); err != nil {
		return "", "", err
	}
	found, err := iam.GetOrg(ctx, tx, orgID)
	return found.ID, "", err
}

func billingFilter(cursor string, limit Limit, from, to time.Time) (ledger.Filter, error) {
	before, err := cursorID(cursor)
	if err != nil {
		return ledger.Filter{}, err
	}
	if !from.IsZero() && !to.IsZero() && !to.After(from) {
		return ledger.Filter{}, fault.New(fault.Unprocessable, "period_empty", "The period ends before it begins.",
			nil).WithField("query/to", "is not after from")
	}
	return ledger.Filter{Before: before, Limit: limitOf(limit), From: from, To: to}, nil
}

func amountOf(text, pointer string) (int64, error) {
	nanos, err := ledger.ParseNanos(text)
	if err != nil {
		return 0, fault.New(fault.Unprocessable, "amount_invalid", "The amount cannot be read.", err).WithHint(pointer,
			"is not an amount", "like 12.5, with at most nine digits after the point")
	}
	return nanos, nil
}

func usageView(u ledger.UsageRecord) UsageRecord {
	return UsageRecord{
		ID: u.ID, OrgID: u.OrgID, ProjectID: u.ProjectID, AppInstanceID: u.AppInstanceID, AppSlug: u.AppSlug,
		AllocationID: u.AllocationID, NodeID: u.NodeID,
		UsageSource: UsageSource(u.UsageSource), Meter: u.Meter, UsageUnit: ledger.Unit(u.Meter),
		Quantity:      ledger.FormatQuantity(u.Meter, u.Quantity),
		OperatingMode: OperatingMode(u.OperatingMode), ControlPlaneScope: ControlPlaneScope(u.ControlPlaneScope),
		RuntimeBackend: RuntimeBackend(u.RuntimeBackend),
		StartedAt:      u.StartedAt, EndedAt: u.EndedAt, CorrelationID: u.CorrelationID, PostingID: u.PostingID,
	}
}

func hourView(h ledger.UsageHour) UsageHour {
	out := UsageHour{
		OrgID: h.OrgID, ProjectID: h.ProjectID, AppInstanceID: h.AppInstanceID, AppSlug: h.AppSlug,
		AllocationID: h.AllocationID, NodeID: h.NodeID,
		SubjectID: h.SubjectID, UsageSource: UsageSource(h.UsageSource), Meter: h.Meter, UsageUnit: ledger.Unit(h.Meter),
		Quantity: ledger.FormatQuantity(h.Meter, h.Quantity), Hour: h.Hour, PriceID: h.PriceID, Currency: h.Currency,
	}
	if h.PriceID != "" {
		out.Charged, out.WrittenOff = ledger.FormatNanos(h.ChargedNanos), ledger.FormatNanos(h.WrittenOffNanos)
	}
	return out
}

func postingView(p ledger.Posting) Posting {
	out := Posting{
		PostingID: p.ID, Kind: PostingKind(p.Kind), Subject: PostingSubject{
			Kind: PostingSubjectKind(p.SubjectKind),
			ID:   p.SubjectID, AppInstanceID: p.AppInstanceID,
		},
		Entries: make([]LedgerEntry, len(p.Legs)), Corrects: p.Corrects, Meter: p.Meter, PriceID: p.PriceID,
		Description: p.Description, CreatedAt: p.CreatedAt,
	}
	if !p.PeriodFrom.IsZero() {
		out.Period = Period{From: p.PeriodFrom, To: p.PeriodTo}
	}
	for i, l := range p.Legs {
		out.Entries[i] = LedgerEntry{Account: l.Account, Amount: ledger.FormatNanos(l.Nanos), Currency: l.Currency}
	}
	return out
}

func priceView(p ledger.Price) Price {
	return Price{
		ID: p.ID, Meter: p.Meter, AppSlug: p.AppSlug, Sku: p.SKU, Currency: p.Currency, Price: ledger.FormatNanos(p.Nanos),
		Per:              PriceUnit(p.Per),
		HostSharePercent: int32(p.HostBasisPoints / 100), From: p.From, To: p.To,
	}
}
