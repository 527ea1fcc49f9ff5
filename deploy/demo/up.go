package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"time"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/pkg/client"
)

const (
	orgSlug     = "demo"
	trustDomain = "demo.gpuaas.internal"
	// pricePerHour of the app's running time, in USD.
	pricePerHour = "3.60"
	credit       = "2000"
	// nextVersion is what the instance is upgraded to.
	nextVersion = "2.0.0"
	// upLimit bounds the whole demo after the programs are built; an image may have to be made first.
	upLimit = 15 * time.Minute
)

// demo is one run of `up`.
type demo struct {
	conf      *config
	state     *state
	hub       *devcluster.Hub
	agent     *devcluster.Agent
	tenant    *scenario.Tenant
	publisher *scenario.Publisher
	app       app
	// operator is the service account that runs the app.
	operator   *client.Hub
	allocation client.Allocation
	instance   client.AppInstance
	out        devcluster.DemoSummary
}

func up(ctx context.Context, c *config) error {
	ctx, cancel := context.WithTimeout(ctx, upLimit)
	defer cancel()
	var err error
	for _, p := range []*string{&c.Bin, &c.Source, &c.Dir, &c.RunDir} {
		if *p, err = filepath.Abs(*p); err != nil {
			return err
		}
	}
	// 0711: the database's own user must be able to pass.
	if err := os.MkdirAll(c.Dir, 0o711); err != nil {
		return err
	}
	d := &demo{conf: c, state: &state{Config: *c}}
	if err := d.state.save(); err != nil {
		return err
	}
	steps := []struct {
		what string
		do   func(context.Context) (string, error)
	}{
		{"hub", d.startHub},
		{"node", d.startNode},
		{"app image", d.loadApp},
		{"ship", d.ship},
		{"run", d.run},
		{"call", d.call},
		{"meter and bill", d.bill},
		{"upgrade and roll back", d.upgrade},
		{"launch again", d.launchAgain},
	}
	for i, step := range steps {
		start := time.Now()
		fmt.Printf("%d/%d %s …\n", i+1, len(steps), step.what)
		said, err := step.do(ctx)
		if err != nil {
			return fmt.Errorf("%s: %w\nlogs are in %s; `make demo-down` removes everything", step.what, err, c.Dir)
		}
		fmt.Printf("    %s  (%.1f s)\n", said, time.Since(start).Seconds())
	}
	d.explain()
	line, err := json.Marshal(d.out)
	if err != nil {
		return err
	}
	fmt.Println(string(line))
	return nil
}

func (d *demo) startHub(ctx context.Context) (string, error) {
	conf := devcluster.HubConfig{
		Bin: d.conf.Bin, Dir: filepath.Join(d.conf.Dir, "hub"), Listen: d.conf.Listen, SessionListen: d.conf.Listen,
		// The demo shows the journal, which is posted once a day by default.
		ExtraArgs: []string{"--posting-interval", "1s"},
	}
	var err error
	if d.hub, err = devcluster.NewHub(ctx, conf, trustDomain); err != nil {
		return "", err
	}
	d.out.HubPID, d.out.APIURL, d.out.CAFile, d.out.TokenFile = d.hub.PID, d.hub.Ready.APIURL, d.hub.Ready.CAFile,
		d.hub.Ready.TokenFile
	said := "serves at " + d.hub.Ready.APIURL + ", root " + d.hub.RootFingerprint[:19] + "…"
	return said, d.state.started("hub", d.hub.PID)
}

func (d *demo) startNode(ctx context.Context) (string, error) {
	address, err := d.containerd(ctx)
	if err != nil {
		return "", err
	}
	d.tenant, err = scenario.NewTenant(ctx, d.hub, filepath.Join(d.conf.Dir, "tenant"), orgSlug, credit)
	if err != nil {
		return "", err
	}
	token, err := scenario.JoinToken(ctx, d.tenant.Admin)
	if err != nil {
		return "", err
	}
	d.state.Agent = devcluster.AgentConfig{
		Bin: d.conf.Bin, Dir: filepath.Join(d.conf.Dir, "agent"), RunDir: filepath.Join(d.conf.RunDir, "agent"),
		APIURL: d.hub.Ready.APIURL, RootFingerprint: d.hub.RootFingerprint,
		ContainerdAddress: address, ContainerdNamespace: "gpuaas-demo", CgroupParent: "/gpuaas-demo",
		Bridge: d.conf.Bridge, PodCIDR: d.conf.PodCIDR, PortRange: d.conf.PortRange,
		// The demo shows the first usage, which takes half a minute by default.
		ExtraArgs: []string{"--metering-interval", "2s", "--usage-interval", "4s"},
	}
	if err := d.state.save(); err != nil {
		return "", err
	}
	withToken := d.state.Agent
	withToken.JoinToken = token
	if d.agent, err = devcluster.StartAgent(ctx, withToken); err != nil {
		return "", err
	}
	d.out.AgentPID = d.agent.PID
	if err := d.state.started("agent", d.agent.PID); err != nil {
		return "", err
	}
	n, err := scenario.AwaitNode(ctx, d.tenant.Admin, d.agent.Ready.NodeID)
	return fmt.Sprintf("%s is online as %s", n.Hostname, n.ID), err
}

// containerd returns the socket of the machine's containerd, or of one that it starts where none serves.
func (d *demo) containerd(ctx context.Context) (string, error) {
	if devcluster.Serves(ctx, d.conf.Containerd) {
		return d.conf.Containerd, nil
	}
	d.state.OwnContainerd = true
	if err := d.state.save(); err != nil {
		return "", err
	}
	c, err := devcluster.StartContainerd(ctx, d.state.containerdDir())
	if err != nil {
		return "", err
	}
	return c.Address, d.state.started("containerd", c.PID())
}

func (d *demo) loadApp(ctx context.Context) (said string, err error) {
	d.app, err = loadApp(ctx, d.conf, d.conf.App)
	return d.app.Description, err
}

func (d *demo) ship(ctx context.Context) (string, error) {
	p, err := d.tenant.NewPublisher(ctx)
	if err != nil {
		return "", err
	}
	d.publisher = p
	if _, err := d.tenant.Ship(ctx, p, d.app.Release); err != nil {
		return "", err
	}
	if err := d.tenant.Entitle(ctx, d.app.Release.AppSlug); err != nil {
		return "", err
	}
	if err := d.tenant.Price(ctx, d.app.Release.AppSlug, pricePerHour); err != nil {
		return "", err
	}
	return fmt.Sprintf("%s %s is signed, active and entitled at %s %s an hour", d.app.Release.AppSlug,
		d.app.Release.Version, pricePerHour, scenario.Currency), nil
}

func (d *demo) run(ctx context.Context) (string, error) {
	var err error
	if d.operator, err = d.tenant.ServiceAccount(ctx, "operator", client.ServiceAccountRoleAppOperator); err != nil {
		return "", err
	}
	if d.allocation, err = d.tenant.Allocate(ctx, d.tenant.Admin, d.agent.Ready.NodeID, d.app.AllocationCores,
		d.app.AllocationMiB); err != nil {
		return "", err
	}
	var took time.Duration
	d.instance, took, err = d.launch(ctx, "first")
	if err != nil {
		return "", err
	}
	d.out.InstanceID, d.out.Status, d.out.AppVersion = d.instance.ID, string(d.instance.Status), d.instance.Version
	return fmt.Sprintf("%s after %d ms, the image pulled and unpacked on the way", d.instance.Status, took.Milliseconds()),
		nil
}

func (d *demo) launch(ctx context.Context, name string) (client.AppInstance, time.Duration, error) {
	return d.tenant.Launch(ctx, d.operator, client.AppInstanceCreate{
		AppSlug: d.app.Release.AppSlug, Version: d.app.Release.Version, DisplayName: name, Parameters: d.app.Parameters,
		PlacementIntent: client.PlacementIntent{AllocationIds: []string{d.allocation.ID}},
	}, func(i client.AppInstance) { fmt.Printf("      %s\n", i.Status) })
}

func (d *demo) call(ctx context.Context) (string, error) {
	if len(d.instance.Endpoints) == 0 {
		return "", fmt.Errorf("instance %s has no endpoint", d.instance.ID)
	}
	d.out.EndpointURL = d.instance.Endpoints[0].URL
	body, err := scenario.Get(ctx, d.out.EndpointURL+d.app.ProbePath)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%s answers %q", d.out.EndpointURL, firstLine(body)), nil
}

func (d *demo) bill(ctx context.Context) (string, error) {
	events, err := d.tenant.Events(ctx, d.operator, d.instance.ID)
	if err != nil {
		return "", err
	}
	for _, e := range events {
		fmt.Printf("      event   %s  %s\n", e.Time.Format(time.RFC3339), e.Type)
	}
	postings, err := d.tenant.AwaitDebit(ctx, d.instance.ID)
	if err != nil {
		return "", err
	}
	usage, err := d.tenant.Usage(ctx, d.instance.ID)
	if err != nil {
		return "", err
	}
	for _, u := range usage {
		fmt.Printf("      usage   %s  %s %s\n", u.EndedAt.Format(time.RFC3339), u.Quantity, u.Meter)
	}
	d.out.UsageRecords, d.out.LedgerZero = len(usage), len(postings) > 0
	for _, p := range postings {
		sums, err := scenario.Sums(p)
		if err != nil {
			return "", err
		}
		for _, sum := range sums {
			d.out.LedgerZero = d.out.LedgerZero && sum.Sign() == 0
		}
		for _, e := range p.Entries {
			fmt.Printf("      ledger  %-8s %14s %s  %s\n", p.Kind, e.Amount, e.Currency, e.Account)
		}
	}
	if !d.out.LedgerZero {
		return "", fmt.Errorf("the postings do not sum to zero")
	}
	return fmt.Sprintf("%d usage records, %d postings, each sums to zero", len(usage), len(postings)), nil
}

// upgrade ships a second version, upgrades the instance in place and rolls it back; each step is an event.
func (d *demo) upgrade(ctx context.Context) (string, error) {
	next := d.app.Release
	next.Version = nextVersion
	if _, err := d.tenant.Ship(ctx, d.publisher, next); err != nil {
		return "", err
	}
	seen, err := d.tenant.Events(ctx, d.operator, d.instance.ID)
	if err != nil {
		return "", err
	}
	say := func(i client.AppInstance) { fmt.Printf("      %s %s\n", i.Version, i.Status) }
	up, err := d.tenant.Upgrade(ctx, d.operator, d.instance.ID, nextVersion, say)
	if err != nil {
		return "", err
	}
	if up.Version != nextVersion {
		return "", fmt.Errorf("the node has left version %s by itself", nextVersion)
	}
	back, err := d.tenant.Rollback(ctx, d.operator, d.instance.ID, say)
	if err != nil {
		return "", err
	}
	if len(back.Endpoints) == 0 || back.Endpoints[0].URL != d.out.EndpointURL {
		return "", errors.New("the endpoint has moved")
	}
	if _, err := scenario.Get(ctx, d.out.EndpointURL+d.app.ProbePath); err != nil {
		return "", err
	}
	all, err := d.tenant.Events(ctx, d.operator, d.instance.ID)
	if err != nil {
		return "", err
	}
	for _, e := range all[len(seen):] {
		fmt.Printf("      event   %s  %s\n", e.Time.Format(time.RFC3339), e.Type)
	}
	d.out.Events, d.out.AppVersion = len(all), back.Version
	return fmt.Sprintf("%s → %s → %s, same member, same endpoint", d.app.Release.Version, up.Version, back.Version), nil
}

func (d *demo) launchAgain(ctx context.Context) (string, error) {
	second, took, err := d.launch(ctx, "second")
	if err != nil {
		return "", err
	}
	d.out.LaunchMillis = millis(took)
	if _, err := d.tenant.Decommission(ctx, d.operator, second.ID); err != nil {
		return "", err
	}
	return fmt.Sprintf("%.0f ms from POST to running; the second instance is decommissioned", d.out.LaunchMillis),
		nil
}

func (d *demo) explain() {
	cli := filepath.Join(d.conf.Bin, "gpuaas")
	fmt.Printf(`
It runs on. Next steps:
  %[1]s login --name demo --url %[2]s --ca-file %[3]s --token-file %[4]s
  %[1]s instances list --project %[5]s
  %[1]s instances logs %[6]s --project %[5]s
  %[1]s instances upgrade %[6]s --to 2.0.0 --wait --project %[5]s
  %[1]s instances rollback %[6]s --wait --project %[5]s
  %[1]s instances events %[6]s --project %[5]s
  %[1]s usage --instance %[6]s
  %[1]s ledger --instance %[6]s
  %[1]s nodes list
  %[7]s workloads --local-socket %[8]s
  curl %[9]s
  make demo-down

`, cli, d.out.APIURL, d.out.CAFile, d.out.TokenFile, d.tenant.Project.ID, d.instance.ID,
		filepath.Join(d.conf.Bin, "gpuaas-agent"), d.state.Agent.LocalSocket(), d.out.EndpointURL+d.app.ProbePath)
}

func millis(d time.Duration) float64 {
	f, _ := new(big.Rat).SetFrac64(d.Microseconds(), 1000).Float64()
	return f
}

func firstLine(s string) string {
	for i, r := range s {
		if r == '\n' || i > 80 {
			return s[:i]
		}
	}
	return s
}
