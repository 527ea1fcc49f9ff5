package query

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"slices"
	"strings"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/access"
	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/plan"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/manifest"
	"github.com/gpuaas/gpuaas/protocol"
)

// auditPage is how many rows of an export are read at once.
const auditPage = 100

// Page is a page of a listing; Next, where it is not empty, begins the next one.
type Page[T any] struct {
	Items []T
	Next  string
}

// Usage lists measured usage, the newest first.
func (s *Service) Usage(ctx context.Context, p iam.Principal, f ledger.Filter) (Page[ledger.UsageRecord], error) {
	return billing(ctx, s, p, iam.UsageRead, f, ledger.ListUsage)
}

// HourlyUsage lists usage by hours, the newest first.
func (s *Service) HourlyUsage(ctx context.Context, p iam.Principal, f ledger.Filter) (Page[ledger.UsageHour], error) {
	return billing(ctx, s, p, iam.UsageRead, f, ledger.ListHours)
}

// Postings lists the journal, the newest first.
func (s *Service) Postings(ctx context.Context, p iam.Principal, f ledger.Filter) (Page[ledger.Posting], error) {
	return billing(ctx, s, p, iam.LedgerRead, f, ledger.ListPostings)
}

func billing[T any](ctx context.Context, s *Service, p iam.Principal, permission iam.Permission, f ledger.Filter,
	list func(context.Context, db.Tx, ledger.Filter) ([]T, string, error),
) (Page[T], error) {
	named := access.Scope{OrgID: f.OrgID, ProjectID: f.ProjectID}
	return read(ctx, s, access.InScope(p, permission, named), func(tx db.Tx, in access.Scope) (out Page[T], err error) {
		f.OrgID, f.ProjectID = in.OrgID, in.ProjectID
		out.Items, out.Next, err = list(ctx, tx, f)
		return out, err
	})
}

// Audit lists the audit trail, the newest row first.
func (s *Service) Audit(ctx context.Context, p iam.Principal, q event.AuditQuery) ([]event.AuditRow, error) {
	named := access.Scope{OrgID: q.OrgID, ProjectID: q.ProjectID}
	return read(ctx, s, access.InScope(p, iam.AuditRead, named),
		func(tx db.Tx, in access.Scope) ([]event.AuditRow, error) {
			q.OrgID, q.ProjectID = in.OrgID, in.ProjectID
			return event.ListAudit(ctx, tx, q)
		})
}

// ExportAudit gives out a range of an org's chain, of the platform's where no org is named, in pages. It ends with the
// last record that there is now.
func (s *Service) ExportAudit(ctx context.Context, p iam.Principal,
	r event.AuditRange,
) (iter.Seq2[event.AuditRow, error], error) {
	named := access.Scope{OrgID: r.OrgID}
	r, err := read(ctx, s, access.InScope(p, iam.AuditExport, named), func(tx db.Tx, in access.Scope) (event.AuditRange,
		error,
	) {
		last, err := event.AuditHead(ctx, tx, in.OrgID)
		if err != nil {
			return event.AuditRange{}, err
		}
		bounded := r
		bounded.OrgID = in.OrgID
		if r.To == 0 || r.To > last.Number {
			bounded.To = last.Number
		}
		if bounded, err = event.Bounded(ctx, tx, bounded); err != nil || bounded.After >= bounded.To {
			return bounded, err
		}
		return keptAudit(ctx, tx, bounded, r.To != 0)
	})
	if err != nil {
		return nil, err
	}
	r.Limit = auditPage
	return func(yield func(event.AuditRow, error) bool) {
		for r.After < r.To {
			rows, err := db.Query(ctx, s.DB, func(tx db.Tx) ([]event.AuditRow, error) { return event.ChainedAudit(ctx, tx, r) })
			if err == nil && len(rows) == 0 {
				err = fmt.Errorf("audit rows after %d are gone", r.After)
			}
			if err != nil {
				yield(event.AuditRow{}, err)
				return
			}
			for _, row := range rows {
				r.After = row.Number
				if !yield(row, nil) {
					return
				}
			}
		}
	}, nil
}

// keptAudit refuses a range of numbers that ends before the first record that is kept. Without such an end, and without
// a record, the range is empty.
func keptAudit(ctx context.Context, tx db.Tx, r event.AuditRange, hasEnd bool) (event.AuditRange, error) {
	first, err := event.FirstAudit(ctx, tx, r)
	if err != nil || first != 0 && first <= r.To {
		return r, err
	}
	if !hasEnd {
		r.To = r.After
		return r, nil
	}
	kept := "none is"
	if first != 0 {
		kept = fmt.Sprintf("the first one that is has number %d", first)
	}
	return r, fault.New(fault.Unprocessable, fault.CodeInvalid, "These rows of the audit trail are no longer kept; "+kept+
		".", nil).WithField("query/to_number", "ends before what is kept").Permanent()
}

// EstimateInput names what is to be priced. Without an allocation its SKU is unknown, and a slice is priced as its GPU.
type EstimateInput struct {
	ProjectID, AppSlug, Version, AllocationID string
	Resources                                 manifest.Choice
	Now                                       time.Time
}

// Estimate is a price with the size that it is for.
type Estimate struct {
	ledger.Estimate
	CPUMillis, MemoryBytes int64
}

// Estimate prices an app before it is launched.
func (s *Service) Estimate(ctx context.Context, p iam.Principal, in EstimateInput) (Estimate, error) {
	return read(ctx, s, access.Project(p, iam.PriceRead, in.ProjectID),
		func(tx db.Tx, project iam.Project) (Estimate, error) {
			version, err := visibleVersion(ctx, tx, p, project, in.AppSlug, in.Version)
			if err != nil {
				return Estimate{}, err
			}
			if err := version.Manifest.CheckChoice(in.Resources); err != nil {
				return Estimate{}, inQuery(err)
			}
			cpuMillis, memoryMiB := version.Manifest.Demand(in.Resources)
			member := ledger.Subject{
				Kind: ledger.Member, OrgID: project.OrgID, ProjectID: project.ID, AppSlug: in.AppSlug,
				CPUMillis: int64(cpuMillis), MemoryBytes: int64(memoryMiB) << 20,
				Accelerators: acceleratorsOf(version.Manifest, in.Resources),
			}
			if in.AllocationID != "" {
				allocation, err := capacity.Get(ctx, tx, project.ID, in.AllocationID)
				if err != nil {
					return Estimate{}, err
				}
				member.SKU = allocation.SKU
				member.SetAccelerators(costliest(allocation.AcceleratorIDs, member.Accelerators, in.Resources.AcceleratorSharing))
			} else if modes := version.Manifest.App.SupportedModes.OperatingModes; !slices.Contains(modes,
				manifest.TenantDedicated) {
				member.OperatingMode = manifest.PlatformManaged // its allocation is lent, and not paid for by the project
			}
			e, err := ledger.EstimateMember(ctx, tx, member, in.Now)
			return Estimate{e, member.CPUMillis, member.MemoryBytes}, err
		})
}

// acceleratorsOf is how many accelerators an instance has where there are enough.
func acceleratorsOf(m manifest.Manifest, c manifest.Choice) (most int64) {
	for _, need := range plan.Needs(m, c, 0) {
		most = max(most, int64(need.Accelerators))
	}
	return most
}

// costliest returns at most n of the accelerators that are shared in one way: of slices the largest.
func costliest(ids []string, n int64, sharing string) []string {
	ids = slices.DeleteFunc(slices.Clone(ids), func(id string) bool {
		_, how, _ := protocol.SliceOf(id)
		return how != sharing
	})
	slices.SortFunc(ids, func(a, b string) int {
		_, _, inA := protocol.SliceOf(a)
		_, _, inB := protocol.SliceOf(b)
		return cmp.Compare(inA, inB)
	})
	return ids[:min(len(ids), int(n))]
}

// inQuery points the fields of a fault about resources at the parameters of the query.
func inQuery(err error) error {
	f := fault.As(err)
	for n := range f.Fields {
		name := strings.TrimPrefix(f.Fields[n].Pointer, "/resources/")
		if at, is := strings.CutPrefix(name, "/environment/requirements"); is {
			name = "requirement" + at
		}
		f.Fields[n].Pointer = "query/" + name
	}
	return f
}

// visibleVersion reads a version of an app; what the caller may not see is NotFound.
func visibleVersion(ctx context.Context, tx db.Tx, p iam.Principal, project iam.Project, slug,
	name string,
) (catalog.Version, error) {
	app, err := catalog.GetApp(ctx, tx, slug)
	if err != nil {
		return catalog.Version{}, err
	}
	if !app.VisibleTo(project.OrgID) {
		// The very words of an app that is not there.
		return catalog.Version{}, fault.New(fault.NotFound, fault.CodeNotFound, "There is no such resource.", nil)
	}
	version, err := catalog.GetVersion(ctx, tx, slug, name)
	if err != nil {
		return catalog.Version{}, err
	}
	if (version.Status == catalog.Draft || version.Status == catalog.Staged) && !seesUnreleased(p, app) {
		return catalog.Version{}, iam.ErrNotFound()
	}
	return version, nil
}

// Wallet is an org's money, by currency.
type Wallet struct {
	OrgID    string
	Balances []ledger.Balance
}

// Wallet reads what an org can still spend and what is held; an empty org is the caller's.
func (s *Service) Wallet(ctx context.Context, p iam.Principal, orgID string) (Wallet, error) {
	if orgID == "" {
		orgID = p.OrgID
	}
	if orgID == "" {
		return Wallet{}, fault.New(fault.Unprocessable, codeOrgRequired, "You belong to no org; say whose wallet you want.",
			nil).WithField("query/org_id", "is required")
	}
	return read(ctx, s, access.Org(p, iam.WalletRead, orgID), func(tx db.Tx, org iam.Org) (Wallet, error) {
		balances, err := ledger.Wallet(ctx, tx, org.ID)
		return Wallet{org.ID, balances}, err
	})
}

// Prices lists the price book, the newest row first: all of it for platform admins, else without other orgs' apps.
func (s *Service) Prices(ctx context.Context, p iam.Principal, f ledger.Filter) (Page[ledger.Price], error) {
	visible := catalog.VisibleTo(p.OrgID)
	if p.PlatformAdmin {
		visible = nil
	}
	return read(ctx, s, access.Platform(p, iam.PriceRead),
		func(tx db.Tx, _ access.Nothing) (out Page[ledger.Price], err error) {
			out.Items, out.Next, err = ledger.ListPrices(ctx, tx, f, visible)
			return out, err
		})
}
