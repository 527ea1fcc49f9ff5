// Package scenario takes the steps of the users of a hub, through the public API and the programs alone: a platform
// admin sets up an org, an app team ships a version, an operator runs it. The demo and the end-to-end tests use it.
package scenario

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/pkg/client"
)

// Tenant is an org with a project and money in its wallet, as its platform admin sees it.
type Tenant struct {
	// Admin may do everything.
	Admin   *client.Hub
	Org     client.Org
	Project client.Project
	// WaitLimit bounds each wait for an instance or a charge; zero leaves that to the context.
	WaitLimit time.Duration

	// credentials of the service accounts, by the connection that uses them.
	credentials map[*client.Hub]client.Credential

	hub devcluster.HubConfig
	url string
	ca  string
	dir string
}

// Admin opens the hub with the token that it keeps in its file.
func Admin(ready devcluster.HubReady) (*client.Hub, error) {
	token, err := os.ReadFile(ready.TokenFile)
	if err != nil {
		return nil, err
	}
	return client.Open(client.Config{
		URL: ready.APIURL, CAFile: ready.CAFile,
		Credential: client.BearerToken(strings.TrimSpace(string(token))),
	})
}

// NewTenant makes an org, a project and a credit. Dir receives the tenant's key files.
func NewTenant(ctx context.Context, h *devcluster.Hub, dir, orgSlug, credit string) (*Tenant, error) {
	admin, err := Admin(h.Ready)
	if err != nil {
		return nil, err
	}
	t := &Tenant{
		Admin: admin, credentials: map[*client.Hub]client.Credential{}, hub: h.Config, url: h.Ready.APIURL,
		ca: h.Ready.CAFile, dir: dir,
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	if t.Org, err = client.Read[client.Org](admin.CreateOrg(ctx, client.OrgCreate{
		Slug:        orgSlug,
		DisplayName: orgSlug,
	})); err != nil {
		return nil, fmt.Errorf("create org: %w", err)
	}
	t.Project, err = client.Read[client.Project](admin.CreateProject(ctx, client.ProjectCreate{
		OrgID: t.Org.ID,
		Slug:  "main", DisplayName: "Main",
	}))
	if err != nil {
		return nil, fmt.Errorf("create project: %w", err)
	}
	if credit == "" {
		return t, nil
	}
	if _, err := client.Read[client.Posting](admin.GrantCredit(ctx, client.CreditGrant{
		OrgID: t.Org.ID, Amount: credit,
		Currency: Currency, Description: "start",
	})); err != nil {
		return nil, fmt.Errorf("grant credit: %w", err)
	}
	return t, nil
}

// Currency of all prices and wallets here.
const Currency = "USD"

// JoinToken makes a one-time token for a node.
func JoinToken(ctx context.Context, admin *client.Hub) (string, error) {
	t, err := client.Read[client.JoinToken](admin.CreateJoinToken(ctx, client.JoinTokenCreate{}))
	return t.Token, err
}

// AwaitNode waits until the node is online.
func AwaitNode(ctx context.Context, admin *client.Hub, nodeID string) (client.Node, error) {
	return await(ctx, func() (client.Node, bool, error) {
		n, err := client.Read[client.Node](admin.GetNode(ctx, nodeID))
		return n, err == nil && n.Status == client.NodeStatusOnline, err
	})
}

// ServiceAccount makes a service account in the project and opens the hub as it: its token is minted with its key.
func (t *Tenant) ServiceAccount(ctx context.Context, slug string, role client.ServiceAccountRole) (*client.Hub, error) {
	sa, err := client.Read[client.ServiceAccount](t.Admin.CreateServiceAccount(ctx, t.Project.ID,
		client.ServiceAccountCreate{Name: slug, Slug: slug, Role: role}))
	if err != nil {
		return nil, fmt.Errorf("create service account: %w", err)
	}
	if err := os.WriteFile(filepath.Join(t.dir, slug+".pem"), []byte(sa.Key.PrivateKeyPem), 0o600); err != nil {
		return nil, err
	}
	conf := client.Config{URL: t.url, CAFile: t.ca}
	conf.Credential, err = client.NewServiceAccountCredential(conf, sa.ID, sa.Key.KeyID, []byte(sa.Key.PrivateKeyPem))
	if err != nil {
		return nil, err
	}
	hub, err := client.Open(conf)
	if err == nil {
		t.credentials[hub] = conf.Credential
	}
	return hub, err
}

// AccessToken is what the service account calls with right now.
func (t *Tenant) AccessToken(ctx context.Context, as *client.Hub) (string, error) {
	c := t.credentials[as]
	if c == nil {
		return "", errors.New("this connection is no service account's")
	}
	return c.Bearer(ctx)
}

// Price sets the price of the app's running time, in USD an hour.
func (t *Tenant) Price(ctx context.Context, appSlug, perHour string) error {
	_, err := client.Read[client.Price](t.Admin.CreatePrice(ctx, client.PriceCreate{
		Meter: "session_seconds", AppSlug: appSlug, Currency: Currency, Price: perHour, Per: client.PriceUnitHour,
	}))
	return err
}

// Entitle lets the project run the app.
func (t *Tenant) Entitle(ctx context.Context, appSlug string) error {
	_, err := client.Read[client.Entitlement](t.Admin.PutEntitlement(ctx, t.Project.ID, appSlug, client.EntitlementPut{
		Enabled: true, PolicyOverrides: client.PolicyOverrides{AllowedOperatingModes: []client.OperatingMode{
			client.OperatingModeTenantDedicated,
		}},
	}))
	return err
}

// Allocate takes a slice without accelerators on the node and waits until it is active.
func (t *Tenant) Allocate(ctx context.Context, as *client.Hub, nodeID string, cores int32,
	memoryMiB int64,
) (client.Allocation, error) {
	a, err := client.Read[client.Allocation](as.CreateAllocation(ctx, t.Project.ID, client.AllocationCreate{
		NodeID: nodeID, CapacityShape: client.CapacityShapeGpuSlice, CPUCores: cores, MemoryMib: memoryMiB,
	}))
	if err != nil {
		return a, fmt.Errorf("create allocation: %w", err)
	}
	return await(ctx, func() (client.Allocation, bool, error) {
		a, err := client.Read[client.Allocation](as.GetAllocation(ctx, t.Project.ID, a.ID))
		return a, err == nil && a.Status == client.AllocationStatusActive, err
	})
}

// Launch creates an instance and waits until a watching client sees it running; took is the time between the two.
func (t *Tenant) Launch(ctx context.Context, as *client.Hub, in client.AppInstanceCreate,
	onChange func(client.AppInstance),
) (i client.AppInstance, took time.Duration, err error) {
	start := time.Now()
	i, err = client.Read[client.AppInstance](as.CreateAppInstance(ctx, t.Project.ID, in))
	if err != nil {
		return i, 0, fmt.Errorf("create app instance: %w", err)
	}
	i, err = t.AwaitStatus(ctx, as, i.ID, client.AppInstanceStatusRunning, onChange)
	return i, time.Since(start), err
}

// AwaitStatus waits until an instance has the status; onChange sees each change and may be nil.
func (t *Tenant) AwaitStatus(ctx context.Context, as *client.Hub, id string, want client.AppInstanceStatus,
	onChange func(client.AppInstance),
) (client.AppInstance, error) {
	ctx, cancel := t.limited(ctx)
	defer cancel()
	return as.WaitInstance(ctx, t.Project.ID, id, want, onChange)
}

func (t *Tenant) limited(ctx context.Context) (context.Context, context.CancelFunc) {
	if t.WaitLimit == 0 {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, t.WaitLimit)
}

// Decommission ends an instance and waits for the node's proof.
func (t *Tenant) Decommission(ctx context.Context, as *client.Hub, id string) (client.AppInstance, error) {
	i, err := client.Read[client.AppInstance](as.DecommissionAppInstance(ctx, t.Project.ID, id))
	return t.await(ctx, as, i, err, client.AppInstanceStatusDecommissioned, nil)
}

// Upgrade upgrades an instance to another version and waits until it runs; onChange sees each change. Where the node
// has left the version by itself, the instance that is returned runs the one before.
func (t *Tenant) Upgrade(ctx context.Context, as *client.Hub, id, version string,
	onChange func(client.AppInstance),
) (client.AppInstance, error) {
	i, err := client.Read[client.AppInstance](as.UpgradeAppInstance(ctx, t.Project.ID, id,
		client.AppInstanceUpgrade{TargetVersion: version}))
	return t.await(ctx, as, i, err, client.AppInstanceStatusRunning, onChange)
}

// Rollback returns an instance to its previous version and waits until it runs.
func (t *Tenant) Rollback(ctx context.Context, as *client.Hub, id string,
	onChange func(client.AppInstance),
) (client.AppInstance, error) {
	i, err := client.Read[client.AppInstance](as.RollbackAppInstance(ctx, t.Project.ID, id, client.AppInstanceRollback{}))
	return t.await(ctx, as, i, err, client.AppInstanceStatusRunning, onChange)
}

// Stop ends the containers of an instance and waits for that.
func (t *Tenant) Stop(ctx context.Context, as *client.Hub, id string) (client.AppInstance, error) {
	i, err := client.Read[client.AppInstance](as.StopAppInstance(ctx, t.Project.ID, id))
	return t.await(ctx, as, i, err, client.AppInstanceStatusStopped, nil)
}

// Start runs a stopped instance again and waits until it runs.
func (t *Tenant) Start(ctx context.Context, as *client.Hub, id string) (client.AppInstance, error) {
	i, err := client.Read[client.AppInstance](as.StartAppInstance(ctx, t.Project.ID, id))
	return t.await(ctx, as, i, err, client.AppInstanceStatusRunning, nil)
}

// await waits for the status that an action on an instance leads to; i and err are the answer to the action.
func (t *Tenant) await(ctx context.Context, as *client.Hub, i client.AppInstance, err error,
	want client.AppInstanceStatus, onChange func(client.AppInstance),
) (client.AppInstance, error) {
	if err != nil {
		return i, fmt.Errorf("ask for an instance that is %s: %w", want, err)
	}
	return t.AwaitStatus(ctx, as, i.ID, want, onChange)
}

// Usage lists all usage records of the instance.
func (t *Tenant) Usage(ctx context.Context, instanceID string) ([]client.UsageRecord, error) {
	return collect[client.UsageRecord](func(cursor string) (*http.Response, error) {
		return t.Admin.ListUsage(ctx,
			&client.ListUsageParams{AppInstanceID: instanceID, Limit: client.PageSize, Cursor: cursor})
	})
}

// Postings lists all postings of the instance.
func (t *Tenant) Postings(ctx context.Context, instanceID string) ([]client.Posting, error) {
	return collect[client.Posting](func(cursor string) (*http.Response, error) {
		return t.Admin.ListLedger(ctx, &client.ListLedgerParams{
			AppInstanceID: instanceID,
			Limit:         client.PageSize, Cursor: cursor,
		})
	})
}

// Events lists all events of the instance.
func (t *Tenant) Events(ctx context.Context, as *client.Hub, instanceID string) ([]client.Event, error) {
	return collect[client.Event](func(cursor string) (*http.Response, error) {
		return as.ListAppInstanceEvents(ctx, t.Project.ID, instanceID,
			&client.ListAppInstanceEventsParams{Limit: client.PageSize, Cursor: cursor})
	})
}

// maxBody bounds what is read of an app's answer.
const maxBody = 1 << 20

// Get fetches a URL of a node's private endpoint from the node itself, and returns the body.
func Get(ctx context.Context, url string) (string, error) {
	return GetWith(ctx, http.DefaultClient, url)
}

// GetWith is Get for a client that knows the way to another node.
func GetWith(ctx context.Context, c *http.Client, url string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	// No connection is reused: it could lead to a container that is gone.
	req.Close = true
	res, err := c.Do(req)
	if err != nil {
		return "", err
	}
	defer func() { _ = res.Body.Close() }()
	body, err := io.ReadAll(io.LimitReader(res.Body, maxBody))
	if err != nil {
		return "", err
	}
	if res.StatusCode != http.StatusOK {
		return string(body), fmt.Errorf("%s answered %s", url, res.Status)
	}
	return string(body), nil
}

// NewID makes an idempotency key or a correlation id.
func NewID() string { return uuid.NewString() }

func collect[T any](page func(cursor string) (*http.Response, error)) ([]T, error) {
	var all []T
	for item, err := range client.All[T](page) {
		if err != nil {
			return all, err
		}
		all = append(all, item)
	}
	return all, nil
}

// await polls until the condition holds; an error of a poll is kept for the report and not fatal: a hub may
// be restarting.
func await[T any](ctx context.Context, poll func() (T, bool, error)) (T, error) {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		v, ok, err := poll()
		if ok {
			return v, nil
		}
		select {
		case <-ctx.Done():
			seen, _ := json.Marshal(v)
			return v, fmt.Errorf("%w; last seen: %s; last error: %w", ctx.Err(), seen, err)
		case <-tick.C:
		}
	}
}

// AwaitCharge waits until the instance's usage has cost something.
func (t *Tenant) AwaitCharge(ctx context.Context, instanceID string) (client.AppInstance, error) {
	ctx, cancel := t.limited(ctx)
	defer cancel()
	return await(ctx, func() (client.AppInstance, bool, error) {
		i, err := client.Read[client.AppInstance](t.Admin.GetAppInstance(ctx, t.Project.ID, instanceID))
		if err != nil {
			return i, false, err
		}
		spent, ok := new(big.Rat).SetString(i.Cost.Spent)
		return i, ok && spent.Sign() > 0, nil
	})
}

// AwaitDebit waits until usage of the instance is in the journal, and returns all its postings.
func (t *Tenant) AwaitDebit(ctx context.Context, instanceID string) ([]client.Posting, error) {
	ctx, cancel := t.limited(ctx)
	defer cancel()
	return await(ctx, func() ([]client.Posting, bool, error) {
		postings, err := t.Postings(ctx, instanceID)
		isUsage := func(p client.Posting) bool { return p.Kind == client.PostingKindUsage }
		return postings, slices.ContainsFunc(postings, isUsage), err
	})
}

// Sums adds the entries of a posting for each currency.
func Sums(p client.Posting) (map[string]*big.Rat, error) {
	sums := map[string]*big.Rat{}
	for _, e := range p.Entries {
		amount, ok := new(big.Rat).SetString(e.Amount)
		if !ok {
			return nil, fmt.Errorf("posting %s: %q is no amount", p.PostingID, e.Amount)
		}
		if sums[e.Currency] == nil {
			sums[e.Currency] = new(big.Rat)
		}
		sums[e.Currency].Add(sums[e.Currency], amount)
	}
	return sums, nil
}
