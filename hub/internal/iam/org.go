package iam

import (
	"context"
	"regexp"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/gpuaas/gpuaas/hub/internal/db"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
)

const (
	// MaxPage bounds a listing.
	MaxPage = 200
	// maxProjectsPerOrg and its like answer 409 limit_reached when full.
	maxProjectsPerOrg            = 1000
	maxServiceAccountsPerProject = 200
	maxLiveTokensPerUser         = 50
	maxSlug                      = 63
	maxName                      = 128
)

// Org is a tenant.
type Org struct {
	ID, Slug, DisplayName string
	CreatedAt             time.Time
}

// Project is a part of an org that holds app instances, allocations and service accounts.
type Project struct {
	ID, OrgID, OrgSlug, Slug, DisplayName string
	CreatedAt                             time.Time
	// Platform: what the platform manages runs in the allocations of this project.
	Platform bool
}

// selectPage returns a page of a query, in order of id and of at most MaxPage+1 rows; limit 0 means MaxPage. The
// query's last two parameters, after args, are the id after which the page begins, NULL for the first one, and the
// limit.
func selectPage[T any](ctx context.Context, tx db.Tx, p db.Page, sql string, args ...any) ([]T, error) {
	if p.After != "" && !db.IsID(p.After) {
		return nil, fault.CursorInvalid()
	}
	limit := MaxPage
	if p.Limit > 0 {
		limit = min(p.Limit, MaxPage+1)
	}
	return db.Select(ctx, tx, pgx.RowToStructByPos[T], sql, append(args, db.OrNull(p.After), limit)...)
}

// selectByID returns the row of a query whose parameter is an id. What is no id is NotFound like an absent row.
func selectByID[T any](ctx context.Context, tx db.Tx, sql, id string) (row T, err error) {
	if !db.IsID(id) {
		return row, ErrNotFound()
	}
	row, err = db.SelectOne(ctx, tx, pgx.RowToStructByPos[T], sql, id)
	return row, absent(err)
}

// CreateOrg makes an org.
func CreateOrg(ctx context.Context, tx db.Tx, o Org) error {
	if err := checkNames(o.Slug, o.DisplayName, "/display_name"); err != nil {
		return err
	}
	made, err := insertOrg(ctx, tx, o)
	if err == nil && !made {
		err = taken("org", "/slug")
	}
	return err
}

// GetOrg finds an org.
func GetOrg(ctx context.Context, tx db.Tx, id string) (Org, error) {
	return selectByID[Org](ctx, tx, `SELECT `+orgColumns+` WHERE id = $1`, id)
}

// GetOrgBySlug finds an org by the slug that stands in repository names and delegations.
func GetOrgBySlug(ctx context.Context, tx db.Tx, slug string) (Org, error) {
	o, err := db.SelectOne(ctx, tx, pgx.RowToStructByPos[Org], `SELECT `+orgColumns+` WHERE slug = $1`, slug)
	return o, absent(err)
}

// ListOrgs lists what p may see: every org for a platform admin, otherwise the own one.
func ListOrgs(ctx context.Context, tx db.Tx, p Principal, page db.Page) ([]Org, error) {
	only := p.OrgID
	switch {
	case p.everywhere():
		only = ""
	case only == "":
		return nil, nil
	}
	return selectPage[Org](ctx, tx, page, `
		SELECT `+orgColumns+`
		WHERE ($1::UUID IS NULL OR id = $1::UUID) AND ($2::UUID IS NULL OR id > $2::UUID)
		ORDER BY id LIMIT $3`, db.OrNull(only))
}

// CreateProject makes a project in an org that exists.
func CreateProject(ctx context.Context, tx db.Tx, p Project) (Project, error) {
	if err := checkNames(p.Slug, p.DisplayName, "/display_name"); err != nil {
		return Project{}, err
	}
	org, err := GetOrg(ctx, tx, p.OrgID)
	if err != nil {
		return Project{}, err
	}
	p.OrgSlug = org.Slug
	if err := below(ctx, tx, maxProjectsPerOrg, "projects in the org",
		`SELECT count(*) FROM projects WHERE org_id = $1`, p.OrgID); err != nil {
		return Project{}, err
	}
	if p.Platform {
		known, err := PlatformProject(ctx, tx)
		if err != nil {
			return Project{}, err
		}
		if known.ID != "" {
			return Project{}, fault.New(fault.Conflict, codeAlreadyExists, "The platform has its project already.",
				nil).WithField("/platform", "may be true for one project only").Permanent()
		}
	}
	made, err := insertProject(ctx, tx, p)
	if err == nil && !made {
		err = taken("project of this org", "/slug")
	}
	return p, err
}

// GetProject finds a project without checking a caller. Commands on behalf of a principal use InProject.
func GetProject(ctx context.Context, tx db.Tx, id string) (Project, error) {
	return selectByID[Project](ctx, tx, `SELECT `+projectColumns+` WHERE p.id = $1`, id)
}

// PlatformProject returns the project in whose allocations runs what the platform manages; one without an id where
// there is none.
func PlatformProject(ctx context.Context, tx db.Tx) (Project, error) {
	list, err := db.Select(ctx, tx, pgx.RowToStructByPos[Project], `SELECT `+projectColumns+` WHERE p.platform`)
	if err != nil || len(list) == 0 {
		return Project{}, err
	}
	return list[0], nil
}

// InProject finds the project and decides whether p may do permission in it. It is the first step of every operation on
// a project's resources: another org's project is NotFound like an absent one.
func InProject(ctx context.Context, tx db.Tx, p Principal, permission Permission, projectID string) (Project, error) {
	return InProjectOn(ctx, tx, p, permission, projectID, "")
}

// InProjectOn is InProject for something that is done to one app instance, which need not exist.
func InProjectOn(ctx context.Context, tx db.Tx, p Principal, permission Permission, projectID,
	instanceID string,
) (Project, error) {
	project, err := GetProject(ctx, tx, projectID)
	if err != nil {
		return Project{}, err
	}
	telemetry.SetFields(ctx, telemetry.Fields{OrgID: project.OrgID, ProjectID: project.ID})
	return project, AuthorizeOn(p, permission, project.OrgID, project.ID, instanceID)
}

// ListProjects lists what p may see, of one org where orgID is not empty.
func ListProjects(ctx context.Context, tx db.Tx, p Principal, orgID string, page db.Page) ([]Project, error) {
	in, err := reachOf(p, ProjectRead)
	switch {
	case err != nil:
		return nil, err
	case in.Everywhere:
	case in.OrgID == "" || (orgID != "" && orgID != in.OrgID):
		return nil, nil
	default:
		orgID = in.OrgID
	}
	return selectPage[Project](ctx, tx, page, `
		SELECT `+projectColumns+`
		WHERE ($1::UUID IS NULL OR p.org_id = $1::UUID) AND ($2::BOOL OR p.id = ANY($3::UUID[])) AND ($4::UUID IS NULL
		OR p.id > $4::UUID)
		ORDER BY p.id LIMIT $5`, db.OrNull(orgID), in.Everywhere || in.OrgWide, in.ProjectIDs)
}

func slugPattern() *regexp.Regexp { return regexp.MustCompile(`^[a-z0-9]([a-z0-9-]*[a-z0-9])?$`) }

func checkNames(slug, name, namePointer string) error {
	if len(slug) > maxSlug || !slugPattern().MatchString(slug) {
		return invalid().WithHint("/slug", "is no slug", "lower-case letters, digits and inner hyphens, at most 63")
	}
	if n := len([]rune(name)); n == 0 || n > maxName {
		return invalid().WithHint(namePointer, "is empty or too long", "1 to 128 characters")
	}
	return nil
}

// invalid is the fault of values that the contract allows and iam does not accept.
func invalid() *fault.Error {
	return fault.New(fault.Unprocessable, fault.CodeInvalid, "The request is well-formed but not acceptable.",
		nil).Permanent()
}

func taken(what, pointer string) *fault.Error {
	return fault.New(fault.Conflict, codeAlreadyExists, "There is already a "+what+" of this name.", nil).WithField(
		pointer,
		"is taken").Permanent()
}

// below refuses one more where as many exist as may; sql counts them.
func below(ctx context.Context, tx db.Tx, limit int, what, sql string, args ...any) error {
	n, err := db.Value[int](ctx, tx, sql, args...)
	if err == nil && n >= limit {
		err = fault.New(fault.Conflict, codeLimitReached, "There are too many "+what+" already; remove one first.", nil)
	}
	return err
}
