package query

import (
	"context"
	"time"

	"github.com/gpuaas/gpuaas/hub/internal/capacity"
	"github.com/gpuaas/gpuaas/hub/internal/catalog"
	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/hub/internal/event"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/ledger"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

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
	return db.ReadTx(ctx, s.DB, func(tx db.Tx) (out Page[T], err error) {
		if f.OrgID, f.ProjectID, err = scope(ctx, tx, p, permission, f.OrgID, f.ProjectID); err != nil {
			return Page[T]{}, err
		}
		out.Items, out.Next, err = list(ctx, tx, f)
		return out, err
	})
}

// Audit lists the audit trail, the newest row first.
func (s *Service) Audit(ctx context.Context, p iam.Principal, q event.AuditQuery) ([]event.AuditRow, error) {
	return db.ReadTx(ctx, s.DB, func(tx db.Tx) (rows []event.AuditRow, err error) {
		if q.OrgID, q.ProjectID, err = scope(ctx, tx, p, iam.AuditRead, q.OrgID, q.ProjectID); err != nil {
			return nil, err
		}
		return event.ListAudit(ctx, tx, q)
	})
}

// scope decides whose rows the caller sees: a project's, those of the caller's org, or, for a platform admin who names
// none, all. A service account sees its project's.
func scope(ctx context.Context, tx db.Tx, p iam.Principal, permission iam.Permission, orgID,
	projectID string,
) (org, project string, err error) {
	if projectID == "" && p.Type == principal.ServiceAccount {
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

// EstimateInput names what is to be priced. Without an allocation its SKU is unknown.
type EstimateInput struct {
	ProjectID, AppSlug, Version, AllocationID string
	Now                                       time.Time
}

// Estimate is a price with the size that it is for.
type Estimate struct {
	ledger.Estimate
	CPUMillis, MemoryBytes int64
}

// Estimate prices an app before it is launched.
func (s *Service) Estimate(ctx context.Context, p iam.Principal, in EstimateInput) (Estimate, error) {
	return db.ReadTx(ctx, s.DB, func(tx db.Tx) (Estimate, error) {
		project, err := iam.InProject(ctx, tx, p, iam.PriceRead, in.ProjectID)
		if err != nil {
			return Estimate{}, err
		}
		version, err := pricedVersion(ctx, tx, p, project, in)
		if err != nil {
			return Estimate{}, err
		}
		member := ledger.Subject{Kind: ledger.Member, OrgID: project.OrgID, ProjectID: project.ID, AppSlug: in.AppSlug}
		if in.AllocationID != "" {
			allocation, err := capacity.Get(ctx, tx, project.ID, in.AllocationID)
			if err != nil {
				return Estimate{}, err
			}
			member.SKU = allocation.SKU
		}
		size := version.Manifest.Version.RuntimeProfile.Resources
		member.CPUMillis, member.MemoryBytes = int64(size.CPUMillis.Default), int64(size.MemoryMiB.Default)<<20
		e, err := ledger.EstimateMember(ctx, tx, member, in.Now)
		return Estimate{e, member.CPUMillis, member.MemoryBytes}, err
	})
}

// pricedVersion reads the version that a price is asked for; what the caller may not see looks absent.
func pricedVersion(ctx context.Context, tx db.Tx, p iam.Principal, project iam.Project,
	in EstimateInput,
) (catalog.Version, error) {
	app, err := catalog.GetApp(ctx, tx, in.AppSlug)
	if err != nil {
		return catalog.Version{}, err
	}
	if !app.VisibleTo(project.OrgID) {
		// The very words of an app that is not there.
		return catalog.Version{}, fault.New(fault.NotFound, fault.CodeNotFound, "There is no such resource.", nil)
	}
	version, err := catalog.GetVersion(ctx, tx, in.AppSlug, in.Version)
	if err != nil {
		return catalog.Version{}, err
	}
	if version.Status == catalog.Draft && !seesDrafts(p, app) {
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
	if err := iam.Authorize(p, iam.WalletRead, orgID, ""); err != nil {
		return Wallet{}, err
	}
	return db.ReadTx(ctx, s.DB, func(tx db.Tx) (Wallet, error) {
		org, err := iam.GetOrg(ctx, tx, orgID)
		if err != nil {
			return Wallet{}, err
		}
		balances, err := ledger.Wallet(ctx, tx, org.ID)
		return Wallet{org.ID, balances}, err
	})
}

// Prices lists the price book, the newest row first; an empty meter is any.
func (s *Service) Prices(ctx context.Context, p iam.Principal, meter, before string,
	limit int,
) (Page[ledger.Price], error) {
	if err := iam.Authorize(p, iam.PriceRead, "", ""); err != nil {
		return Page[ledger.Price]{}, err
	}
	return db.ReadTx(ctx, s.DB, func(tx db.Tx) (out Page[ledger.Price], err error) {
		out.Items, out.Next, err = ledger.ListPrices(ctx, tx, meter, before, limit)
		return out, err
	})
}
