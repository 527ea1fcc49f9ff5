package httpapi

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/query"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
)

// ListUsage lists measured usage, the newest first.
func (s *Server) ListUsage(ctx context.Context, r ListUsageRequestObject) (ListUsageResponseObject, error) {
	q := r.Params
	f, err := billingFilter(q.Cursor, q.Limit, q.From, q.To)
	if err != nil {
		return nil, err
	}
	f.AppInstanceID, f.UsageSource, f.Meter = q.AppInstanceID, string(q.UsageSource), q.Meter
	f.OrgID, f.ProjectID = q.OrgID, q.ProjectID
	page, err := s.Queries.Usage(ctx, principalOf(ctx), f)
	return ListUsage200JSONResponse{Items: views(page.Items, usageView), NextCursor: page.Next}, err
}

// hourlyWindow is how far back hours are listed from `to`, or from now, where the caller does not say.
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
		f.From = f.To.Add(-hourlyWindow)
		if f.To.IsZero() {
			f.From = metaFrom(ctx).Now.Add(-hourlyWindow)
		}
	}
	f.Before, f.AppInstanceID, f.Meter = q.Cursor, q.AppInstanceID, q.Meter
	f.OrgID, f.ProjectID = q.OrgID, q.ProjectID
	page, err := s.Queries.HourlyUsage(ctx, principalOf(ctx), f)
	return ListHourlyUsage200JSONResponse{Items: views(page.Items, hourView), NextCursor: page.Next}, err
}

// ListLedger lists the journal, the newest first.
func (s *Server) ListLedger(ctx context.Context, r ListLedgerRequestObject) (ListLedgerResponseObject, error) {
	q := r.Params
	f, err := billingFilter(q.Cursor, q.Limit, q.From, q.To)
	if err != nil {
		return nil, err
	}
	f.AppInstanceID, f.Kind = q.AppInstanceID, string(q.Kind)
	f.OrgID, f.ProjectID = q.OrgID, q.ProjectID
	page, err := s.Queries.Postings(ctx, principalOf(ctx), f)
	return ListLedger200JSONResponse{Items: views(page.Items, postingView), NextCursor: page.Next}, err
}

// EstimateCost prices an app before it is launched.
func (s *Server) EstimateCost(ctx context.Context, r EstimateCostRequestObject) (EstimateCostResponseObject, error) {
	chosen := manifest.Choice{
		AcceleratorSharing: string(r.Params.AcceleratorSharing),
		CPUMillis:          uint64(r.Params.CPUMillis),
		MemoryMiB:          uint64(r.Params.MemoryMib),
		Environment:        r.Params.Requirement,
	}
	if count := int(r.Params.Accelerators); count > 0 {
		chosen.Accelerators = &count
	}
	e, err := s.Queries.Estimate(ctx, principalOf(ctx), query.EstimateInput{
		ProjectID:    r.ProjectID,
		AppSlug:      r.AppSlug,
		Version:      r.Version,
		AllocationID: r.Params.AllocationID,
		Resources:    chosen,
		Now:          metaFrom(ctx).Now,
	})
	if err != nil {
		return nil, err
	}
	out := CostEstimate{
		Currency:    e.Currency,
		PerHour:     ledger.FormatNanos(e.PerHourNanos),
		Rates:       []CostRate{},
		CPUMillis:   e.CPUMillis,
		MemoryBytes: e.MemoryBytes,
	}
	for _, rate := range e.Rates {
		out.Rates = append(out.Rates, CostRate{
			Meter:   rate.Meter,
			PriceID: rate.PriceID,
			PerHour: ledger.FormatNanos(rate.PerHourNanos),
		})
	}
	return EstimateCost200JSONResponse(out), nil
}

// GetWallet says what the org can still spend and what is held.
func (s *Server) GetWallet(ctx context.Context, r GetWalletRequestObject) (GetWalletResponseObject, error) {
	wallet, err := s.Queries.Wallet(ctx, principalOf(ctx), r.Params.OrgID)
	if err != nil {
		return nil, err
	}
	out := Wallet{OrgID: wallet.OrgID, Balances: []WalletBalance{}}
	for _, b := range wallet.Balances {
		out.Balances = append(out.Balances, WalletBalance{
			Currency:  b.Currency,
			Available: ledger.FormatNanos(b.AvailableNanos),
			Held:      ledger.FormatNanos(b.HeldNanos),
		})
	}
	return GetWallet200JSONResponse(out), nil
}

// GrantCredit puts money into an org's wallet.
func (s *Server) GrantCredit(ctx context.Context, r GrantCreditRequestObject) (GrantCreditResponseObject, error) {
	nanos, err := amountOf(r.Body.Amount, "/amount")
	if err != nil {
		return nil, err
	}
	p, err := s.Commands.GrantCredit(ctx, metaFrom(ctx), ledger.Grant{
		OrgID: r.Body.OrgID, Currency: r.Body.Currency, Nanos: nanos, Description: r.Body.Description,
	})
	return GrantCredit201JSONResponse(postingView(p)), err
}

// ListPrices lists the price book, the newest row first.
func (s *Server) ListPrices(ctx context.Context, r ListPricesRequestObject) (ListPricesResponseObject, error) {
	before, err := cursorID(r.Params.Cursor)
	if err != nil {
		return nil, err
	}
	page, err := s.Queries.Prices(ctx, principalOf(ctx),
		ledger.Filter{Meter: r.Params.Meter, Before: before, Limit: limitOf(r.Params.Limit)})
	return ListPrices200JSONResponse{Items: views(page.Items, priceView), NextCursor: page.Next}, err
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
	return CreatePrice201JSONResponse(priceView(p)), err
}

func billingFilter(cursor string, limit Limit, from, to time.Time) (ledger.Filter, error) {
	before, err := cursorID(cursor)
	if err != nil {
		return ledger.Filter{}, err
	}
	if !from.IsZero() && !to.IsZero() && !to.After(from) {
		return ledger.Filter{}, fault.New(fault.Unprocessable, codePeriodEmpty, "The period ends before it begins.",
			nil).WithField("query/to", "is not after from")
	}
	return ledger.Filter{Before: before, Limit: limitOf(limit), From: from, To: to}, nil
}

func amountOf(text, pointer string) (int64, error) {
	nanos, err := ledger.ParseNanos(text)
	if err != nil {
		return 0, fault.New(fault.Unprocessable, ledger.CodeAmountInvalid, "The amount cannot be read.",
			err).WithHint(pointer,
			"is not an amount", "like 12.5, with at most nine digits after the point")
	}
	return nanos, nil
}

func usageView(u ledger.UsageRecord) UsageRecord {
	return UsageRecord{
		ID: u.ID, OrgID: u.OrgID, ProjectID: u.ProjectID, AppInstanceID: u.AppInstanceID, AppSlug: u.AppSlug,
		AllocationID: u.AllocationID, VolumeID: u.VolumeID, NodeID: u.NodeID,
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
