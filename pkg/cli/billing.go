package cli

import (
	"context"
	"fmt"
	"net/http"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/pkg/client"
)

func (a *app) usageCommand() *cobra.Command {
	var (
		p                client.ListUsageParams
		instance, source string
	)
	columns := []column[client.UsageRecord]{
		{"METER", func(u client.UsageRecord) string { return u.Meter }},
		{"QUANTITY", func(u client.UsageRecord) string { return u.Quantity + " " + u.UsageUnit }},
		{"SOURCE", func(u client.UsageRecord) string { return string(u.UsageSource) }},
		{"APP", func(u client.UsageRecord) string { return u.AppSlug }},
		{"INSTANCE", func(u client.UsageRecord) string { return u.AppInstanceID }},
		{"FROM", func(u client.UsageRecord) string { return stamp(u.StartedAt) }},
		{"TO", func(u client.UsageRecord) string { return stamp(u.EndedAt) }},
		{"POSTING", func(u client.UsageRecord) string { return u.PostingID }},
	}
	c := listing(a, "usage", "Measured usage, newest first", cobra.NoArgs, columns, func(ctx context.Context, s *session,
		_ []string, cursor string,
	) (_ *http.Response, err error) {
		p.Cursor, p.Limit, p.UsageSource = cursor, client.PageSize, client.UsageSource(source)
		if p.ProjectID, p.AppInstanceID, err = s.billed(ctx, instance); err != nil {
			return nil, err
		}
		return s.hub.ListUsage(ctx, &p, s.editors()...)
	})
	f := c.Flags()
	f.StringVar(&instance, "instance", "", "only of this app instance, by id or display name")
	f.StringVar(&source, "source", "", "allocation, app_runtime or volume")
	f.StringVar(&p.Meter, "meter", "", "only this meter")
	f.Var(timeFlag{&p.From}, "from", "only what ended after this time (RFC 3339, or a span back from now)")
	f.Var(timeFlag{&p.To}, "to", "only what started before this time")
	c.AddCommand(a.hourlyUsageCommand())
	return c
}

func (a *app) hourlyUsageCommand() *cobra.Command {
	var (
		p        client.ListHourlyUsageParams
		instance string
	)
	columns := []column[client.UsageHour]{
		{"HOUR", func(h client.UsageHour) string { return stamp(h.Hour) }},
		{"METER", func(h client.UsageHour) string { return h.Meter }},
		{"QUANTITY", func(h client.UsageHour) string { return h.Quantity + " " + h.UsageUnit }},
		{"CHARGED", func(h client.UsageHour) string { return strings.TrimSpace(h.Charged + " " + h.Currency) }},
		{"APP", func(h client.UsageHour) string { return h.AppSlug }},
		{"INSTANCE", func(h client.UsageHour) string { return h.AppInstanceID }},
	}
	c := listing(a, "hourly", "Usage of each hour and what it was charged, newest first", cobra.NoArgs, columns,
		func(ctx context.Context, s *session, _ []string, cursor string) (_ *http.Response, err error) {
			p.Cursor, p.Limit = cursor, client.PageSize
			if p.ProjectID, p.AppInstanceID, err = s.billed(ctx, instance); err != nil {
				return nil, err
			}
			return s.hub.ListHourlyUsage(ctx, &p, s.editors()...)
		})
	f := c.Flags()
	f.StringVar(&instance, "instance", "", "only of this app instance, by id or display name")
	f.StringVar(&p.Meter, "meter", "", "only this meter")
	f.Var(timeFlag{&p.From}, "from", "only hours that begin at or after this time (RFC 3339, or a span back from now; "+
		"default 31 days)")
	f.Var(timeFlag{&p.To}, "to", "only hours that begin before this time")
	return c
}

// billed resolves the project and the instance that a billing query is limited to; both are optional.
func (s *session) billed(ctx context.Context, instance string) (project, id string, err error) {
	if s.project != "" || s.context.Project != "" || instance != "" && !isID(instance) {
		if project, err = s.projectID(ctx); err != nil {
			return "", "", err
		}
	}
	if instance != "" {
		id, err = s.instanceID(ctx, project, instance)
	}
	return project, id, err
}

func postingColumns() []column[client.Posting] {
	return []column[client.Posting]{
		{"AT", func(p client.Posting) string { return stamp(p.CreatedAt) }},
		{"KIND", func(p client.Posting) string { return string(p.Kind) }},
		{"SUBJECT", func(p client.Posting) string { return string(p.Subject.Kind) + " " + p.Subject.ID }},
		{"ENTRIES", func(p client.Posting) string {
			legs := make([]string, len(p.Entries))
			for i, e := range p.Entries {
				legs[i] = fmt.Sprintf("%s %s %s", e.Account, e.Amount, e.Currency)
			}
			return strings.Join(legs, "; ")
		}},
		{"POSTING", func(p client.Posting) string { return p.PostingID }},
	}
}

func (a *app) ledgerCommand() *cobra.Command {
	var (
		p              client.ListLedgerParams
		instance, kind string
	)
	c := listing(a, "ledger", "Postings, newest first; the entries of each sum to zero", cobra.NoArgs, postingColumns(),
		func(ctx context.Context, s *session, _ []string, cursor string) (_ *http.Response, err error) {
			p.Cursor, p.Limit, p.Kind = cursor, client.PageSize, client.PostingKind(kind)
			if p.ProjectID, p.AppInstanceID, err = s.billed(ctx, instance); err != nil {
				return nil, err
			}
			return s.hub.ListLedger(ctx, &p, s.editors()...)
		})
	f := c.Flags()
	f.StringVar(&instance, "instance", "", "only of this app instance, by id or display name")
	f.StringVar(&kind, "kind", "", "only postings of this kind")
	f.Var(timeFlag{&p.From}, "from", "only after this time (RFC 3339, or a span back from now)")
	f.Var(timeFlag{&p.To}, "to", "only before this time")
	return c
}

func (a *app) walletCommand() *cobra.Command {
	var org string
	c := a.action("wallet", "What the org can still spend, and what is held", cobra.NoArgs, func(ctx context.Context,
		s *session, _ []string,
	) error {
		id, err := s.orgID(ctx, org)
		if err != nil {
			return err
		}
		w, err := client.Read[client.Wallet](s.hub.GetWallet(ctx, &client.GetWalletParams{OrgID: id}, s.editors()...))
		if err != nil {
			return err
		}
		s.progress.stop()
		if s.output != "table" {
			return encode(s.env.Stdout, s.output, w)
		}
		return table(s.env.Stdout, w.Balances, []column[client.WalletBalance]{
			{"CURRENCY", func(b client.WalletBalance) string { return b.Currency }},
			{"AVAILABLE", func(b client.WalletBalance) string { return b.Available }},
			{"HELD", func(b client.WalletBalance) string { return b.Held }},
		})
	})
	c.Flags().StringVar(&org, "org", "", "org, by id or slug (default: your own)")
	return c
}

func (a *app) creditsCommand() *cobra.Command {
	var description string
	grant := a.action("grant ORG AMOUNT CURRENCY", "Put money into an org's wallet", cobra.ExactArgs(3),
		func(ctx context.Context, s *session, args []string) error {
			org, err := s.orgID(ctx, args[0])
			if err != nil {
				return err
			}
			return showAnswer(s, postingColumns())(s.hub.GrantCredit(ctx, client.CreditGrant{
				OrgID: org, Amount: args[1],
				Currency: args[2], Description: description,
			}, s.editors()...))
		})
	grant.Flags().StringVar(&description, "description", "credit", "why")
	return group("credits", "Money for orgs (platform admin)", grant)
}

func (a *app) pricesCommand() *cobra.Command {
	columns := []column[client.Price]{
		{"METER", func(p client.Price) string { return p.Meter }},
		{"PRICE", func(p client.Price) string { return fmt.Sprintf("%s %s per %s", p.Price, p.Currency, p.Per) }},
		{"APP", func(p client.Price) string { return p.AppSlug }},
		{"SKU", func(p client.Price) string { return p.Sku }},
		{"HOST SHARE", func(p client.Price) string { return fmt.Sprintf("%d%%", p.HostSharePercent) }},
		{"FROM", func(p client.Price) string { return stamp(p.From) }},
		{"TO", func(p client.Price) string { return stamp(p.To) }},
		{"ID", func(p client.Price) string { return p.ID }},
	}
	var (
		body client.PriceCreate
		per  string
	)
	create := a.action("create METER PRICE CURRENCY", "Add a price; it ends the one before it", cobra.ExactArgs(3),
		func(ctx context.Context, s *session, args []string) error {
			body.Meter, body.Price, body.Currency, body.Per = args[0], args[1], args[2], client.PriceUnit(per)
			return showAnswer(s, columns)(s.hub.CreatePrice(ctx, body, s.editors()...))
		})
	f := create.Flags()
	f.StringVar(&per, "per", string(client.PriceUnitHour), "second, minute, hour, or unit for an app's own meter")
	f.StringVar(&body.AppSlug, "app", "", "only for this app")
	f.StringVar(&body.Sku, "sku", "", "only for this SKU")
	f.Int32Var(&body.HostSharePercent, "host-share", 0, "percent that the node's owner gets")
	f.Var(timeFlag{&body.From}, "from", "when it begins (default: now)")
	return group("prices", "The price book (platform admin)", create,
		listing(a, "list", "Prices", cobra.NoArgs, columns, func(ctx context.Context, s *session, _ []string,
			cursor string,
		) (*http.Response, error) {
			return s.hub.ListPrices(ctx, &client.ListPricesParams{Cursor: cursor, Limit: client.PageSize}, s.editors()...)
		}))
}
