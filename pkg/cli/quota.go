package cli

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/pkg/client"
)

func quotaColumns() []column[client.OrgQuotaItem] {
	return []column[client.OrgQuotaItem]{
		{"QUOTA", func(q client.OrgQuotaItem) string { return string(q.Name) }},
		{"USED", func(q client.OrgQuotaItem) string { return strconv.FormatInt(q.Used, 10) }},
		{"LIMIT", func(q client.OrgQuotaItem) string { return strconv.FormatInt(q.Limit, 10) }},
		{"DEFAULT", func(q client.OrgQuotaItem) string { return strconv.FormatInt(q.DefaultLimit, 10) }},
	}
}

func (a *app) quotaCommand() *cobra.Command {
	return a.action("quota [ORG]", "What an org may hold, and what it holds; your own where absent", cobra.MaximumNArgs(1),
		func(ctx context.Context, s *session, args []string) error {
			id, err := s.orgOrOwn(ctx, strings.Join(args, ""))
			if err != nil {
				return err
			}
			q, err := client.Read[client.OrgQuota](s.hub.GetOrgQuota(ctx, id, s.editors()...))
			if err != nil {
				return err
			}
			return showList(s, q.Items, quotaColumns())
		})
}

func (a *app) setQuotaCommand() *cobra.Command {
	c := a.action("set-quota ORG [NAME=LIMIT…]", "Set what an org may hold (platform admin)", cobra.MinimumNArgs(1),
		func(ctx context.Context, s *session, args []string) error {
			body := client.OrgQuotaPut{Limits: []client.QuotaLimit{}}
			for _, arg := range args[1:] {
				name, text, _ := strings.Cut(arg, "=")
				limit, err := strconv.ParseInt(text, 10, 64)
				if err != nil || limit < 0 {
					return usage(fmt.Errorf("%q is not NAME=LIMIT; gpuaas orgs quota lists the names", arg))
				}
				body.Limits = append(body.Limits, client.QuotaLimit{Name: client.QuotaName(name), Limit: limit})
			}
			id, err := s.orgOrOwn(ctx, args[0])
			if err != nil {
				return err
			}
			q, err := client.Read[client.OrgQuota](s.hub.PutOrgQuota(ctx, id, body, s.editors()...))
			if err != nil {
				return err
			}
			return showList(s, q.Items, quotaColumns())
		})
	c.Long = "Set what an org may hold. Quotas that are not named get the hub's default; a limit below what is in use " +
		"takes nothing away."
	return c
}

func slugColumns() []column[client.OwnedSlug] {
	return []column[client.OwnedSlug]{
		{"SLUG", func(o client.OwnedSlug) string { return o.Slug }},
		{"PUBLISHED", func(o client.OwnedSlug) string { return strconv.FormatBool(o.Published) }},
		{"ORG", func(o client.OwnedSlug) string { return o.OrgID }},
		{"CREATED", func(o client.OwnedSlug) string { return stamp(o.CreatedAt) }},
	}
}

func (a *app) slugsCommand() *cobra.Command {
	var org string
	c := listing(a, "slugs", "App slugs that belong to an org", cobra.NoArgs, slugColumns(),
		func(ctx context.Context, s *session, _ []string, cursor string) (*http.Response, error) {
			id, err := s.orgOrOwn(ctx, org)
			if err != nil {
				return nil, err
			}
			return s.hub.ListAppSlugs(ctx, id,
				&client.ListAppSlugsParams{Cursor: cursor, Limit: client.PageSize}, s.editors()...)
		})
	c.Flags().StringVar(&org, "org", "", "org, by id or slug (default: your own)")
	return c
}

func (a *app) releaseSlugCommand() *cobra.Command {
	var org string
	c := a.action("release-slug SLUG", "Give back an app slug under which nothing was published", cobra.ExactArgs(1),
		func(ctx context.Context, s *session, args []string) error {
			id, err := s.orgOrOwn(ctx, org)
			if err != nil {
				return err
			}
			return closed(s.hub.ReleaseAppSlug(ctx, id, args[0], s.editors()...))
		})
	c.Flags().StringVar(&org, "org", "", "org, by id or slug (default: your own)")
	return c
}

func (a *app) transferSlugCommand() *cobra.Command {
	var org string
	c := a.action("transfer-slug SLUG", "Give an app slug, under which nothing was published, to another org (platform "+
		"admin)", cobra.ExactArgs(1),
		func(ctx context.Context, s *session, args []string) error {
			id, err := s.orgID(ctx, org)
			if err != nil {
				return err
			}
			return showAnswer(s, slugColumns())(s.hub.TransferAppSlug(ctx, args[0], client.AppSlugTransfer{OrgID: id},
				s.editors()...))
		})
	c.Flags().StringVar(&org, "org", "", "org, by id or slug (default: the platform)")
	return c
}

// orgOrOwn finds an org by id or slug; empty is the caller's own.
func (s *session) orgOrOwn(ctx context.Context, want string) (string, error) {
	id, err := s.orgID(ctx, want)
	if err != nil || id != "" {
		return id, err
	}
	who, err := client.Read[client.Whoami](s.hub.Whoami(ctx))
	if err == nil && who.OrgID == "" {
		err = usage(fmt.Errorf("you belong to no org; name one"))
	}
	return who.OrgID, err
}
