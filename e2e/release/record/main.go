// Command record records what a version leaves on the disks of a hub and of a node, for the tests that hold later
// versions against it. It builds the version and runs its programs through a short life: an app that runs, one that is
// stopped, one that is gone, usage that is billed and usage that the node could not send yet.
//
//	go run ./e2e/release/record -version v0.1.0
//
// The recording holds keys, so it stays in .cache and out of the repository; each machine records its own.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"time"

	"github.com/gpuaas/gpuaas/deploy/devcluster"
	"github.com/gpuaas/gpuaas/deploy/devcluster/scenario"
	"github.com/gpuaas/gpuaas/e2e/release"
	"github.com/gpuaas/gpuaas/pkg/client"
)

const (
	trustDomain = "release.gpuaas.internal"
	appSlug     = "hello"
	// unsentFor is how long the node goes on without its hub, so that usage waits on its disk.
	unsentFor = 8 * time.Second
	// limit bounds the whole, with the time to build the programs.
	limit = 5 * time.Minute
)

func main() {
	name := flag.String("version", "", "tag or commit; the newest tag where absent")
	app := flag.String("app", "bin/demo-app", "the app's program")
	flag.Parse()
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt)
	defer cancel()
	ctx, stop := context.WithTimeout(ctx, limit)
	defer stop()
	if err := run(ctx, *name, *app); err != nil {
		fmt.Fprintln(os.Stderr, err)
		cancel()
		os.Exit(1) //nolint:gocritic // cancel ran
	}
}

// run builds the version, records it and makes it the one that tests read.
func run(ctx context.Context, name, app string) error {
	root, err := filepath.Abs(".")
	if err != nil {
		return err
	}
	version, ok, err := release.Last(ctx, root)
	if name != "" {
		version, err = release.Find(ctx, root, name)
		ok = err == nil
	}
	switch {
	case err != nil:
		return err
	case !ok:
		return errors.New("no release is tagged yet: name a version")
	}
	if err := version.Build(ctx, root); err != nil {
		return err
	}
	if err := record(ctx, version.Bin(), app, filepath.Join(version.Dir, "recording")); err != nil {
		return err
	}
	last := filepath.Join(root, ".cache", "release", "last")
	if err := os.Remove(last); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return os.Symlink(filepath.Join(version.Commit, "recording"), last)
}

// recording is one hub with one node on this machine.
type recording struct {
	dir, bin, out string
	containerd    *devcluster.Containerd
	hub           *devcluster.Hub
	agent         *devcluster.Agent
	tenant        *scenario.Tenant
	operator      *client.Hub
	instances     []client.AppInstance
}

func record(ctx context.Context, bin, app, out string) (err error) {
	if err := errors.Join(os.RemoveAll(out), os.MkdirAll(out, 0o700)); err != nil {
		return err
	}
	// Below /tmp, where an unprivileged PostgreSQL can work.
	r := &recording{dir: fmt.Sprintf("/tmp/gpuaas-release-%d", os.Getpid()), bin: bin, out: out}
	if err := os.Mkdir(r.dir, 0o711); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(r.dir)) }()
	if r.containerd, err = devcluster.StartContainerd(ctx, filepath.Join(r.dir, "containerd")); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.containerd.Destroy()) }()
	defer func() { err = errors.Join(err, r.end()) }()
	for _, step := range []func(context.Context) error{
		r.startHub, r.startNode, func(ctx context.Context) error {
			return r.ship(ctx, app)
		}, r.live, r.keepAnswers, r.keepDatabase, r.keepHub, r.keepNode,
	} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (r *recording) startHub(ctx context.Context) error {
	c := devcluster.HubConfig{
		Bin: r.bin, Dir: filepath.Join(r.dir, "hub"), Listen: "127.0.0.1:0",
		SessionListen: "127.0.0.1:0",
	}
	var err error
	if r.hub, err = devcluster.NewHub(ctx, c, trustDomain); err != nil {
		return err
	}
	r.tenant, err = scenario.NewTenant(ctx, r.hub, filepath.Join(r.dir, "tenant"), "acme", "10000")
	if err != nil {
		return err
	}
	r.operator, err = r.tenant.ServiceAccount(ctx, "operator", client.ServiceAccountRoleAppOperator)
	return err
}

func (r *recording) startNode(ctx context.Context) error {
	token, err := scenario.JoinToken(ctx, r.tenant.Admin)
	if err != nil {
		return err
	}
	r.agent, err = devcluster.StartAgent(ctx, devcluster.AgentConfig{
		Bin: r.bin, Dir: filepath.Join(r.dir, "node"), RunDir: filepath.Join(r.dir, "run"), JoinToken: token,
		APIURL: r.hub.Ready.APIURL, RootFingerprint: r.hub.RootFingerprint,
		ContainerdAddress: r.containerd.Address, ContainerdNamespace: "release", Bridge: "gprel0",
		PodCIDR:   "10.230.0.0/24",
		PortRange: "23900-23919", CgroupParent: "/gpuaas-release",
		ExtraArgs: []string{
			"--metering-interval", "1s", "--usage-interval", "3s", "--resync", "5s", "--report-interval",
			"5s",
		},
	})
	if err != nil {
		return err
	}
	_, err = scenario.AwaitNode(ctx, r.tenant.Admin, r.agent.Ready.NodeID)
	return err
}

func (r *recording) ship(ctx context.Context, app string) error {
	publisher, err := r.tenant.NewPublisher(ctx)
	if err != nil {
		return err
	}
	template, err := os.ReadFile("deploy/demo/app/manifest.yaml")
	if err != nil {
		return err
	}
	image, err := devcluster.DemoImage(app)
	if err != nil {
		return err
	}
	for _, version := range []string{"1.0.0", "1.1.0"} {
		if _, err := r.tenant.Ship(ctx, publisher, scenario.Release{
			AppSlug: appSlug, Version: version, Image: image,
			Template: template,
		}); err != nil {
			return err
		}
	}
	if err := r.tenant.Entitle(ctx, appSlug); err != nil {
		return err
	}
	return r.tenant.Price(ctx, appSlug, "3.60")
}

// live leaves one instance running after an upgrade, one stopped and one decommissioned.
func (r *recording) live(ctx context.Context) error {
	a, err := r.tenant.Allocate(ctx, r.tenant.Admin, r.agent.Ready.NodeID, 2, 1024)
	if err != nil {
		return err
	}
	for _, name := range []string{"running", "stopped", "gone"} {
		i, _, err := r.tenant.Launch(ctx, r.operator, client.AppInstanceCreate{
			AppSlug: appSlug, Version: "1.0.0", DisplayName: name, PlacementIntent: client.PlacementIntent{
				AllocationIds: []string{a.ID},
			},
		}, nil)
		if err != nil {
			return err
		}
		if _, err := r.tenant.AwaitCharge(ctx, i.ID); err != nil {
			return err
		}
		r.instances = append(r.instances, i)
	}
	if _, err := r.tenant.Upgrade(ctx, r.operator, r.instances[0].ID, "1.1.0", nil); err != nil {
		return err
	}
	if _, err := r.tenant.Stop(ctx, r.operator, r.instances[1].ID); err != nil {
		return err
	}
	_, err = r.tenant.Decommission(ctx, r.operator, r.instances[2].ID)
	return err
}

// answers are the answers of the API before the upgrade.
type answers struct {
	NodeID    string               `json:"node_id"`
	ProjectID string               `json:"project_id"`
	Instances []client.AppInstance `json:"instances"`
	Postings  []client.Posting     `json:"postings"`
	Usage     []client.UsageRecord `json:"usage"`
	Events    map[string][]string  `json:"events"`
}

// keepAnswers cuts the node off first, so that nothing changes between the answers and the copy of the database.
func (r *recording) keepAnswers(ctx context.Context) error {
	if err := r.agent.Kill9(); err != nil {
		return err
	}
	told := answers{NodeID: r.agent.Ready.NodeID, ProjectID: r.tenant.Project.ID, Events: map[string][]string{}}
	for _, i := range r.instances {
		now, err := client.Read[client.AppInstance](r.operator.GetAppInstance(ctx, r.tenant.Project.ID, i.ID))
		if err != nil {
			return err
		}
		postings, err := r.tenant.Postings(ctx, i.ID)
		if err != nil {
			return err
		}
		usage, err := r.tenant.Usage(ctx, i.ID)
		if err != nil {
			return err
		}
		events, err := r.tenant.Events(ctx, r.operator, i.ID)
		if err != nil {
			return err
		}
		for _, e := range events {
			told.Events[i.ID] = append(told.Events[i.ID], e.Type)
		}
		told.Instances, told.Postings, told.Usage = append(told.Instances, now), append(told.Postings, postings...),
			append(told.Usage, usage...)
	}
	text, err := json.MarshalIndent(told, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.out, "answers.json"), append(text, '\n'), 0o600)
}

// keepDatabase writes the rows as SQL statements, which every later version of PostgreSQL reads.
func (r *recording) keepDatabase(ctx context.Context) error {
	return r.shell(ctx,
		`pg_dump --host "$1/hub/data/postgres/run" --username gpuaas --no-owner --no-privileges --rows-per-insert=500 `+
			`gpuaas | grep -v '^\\' | gzip -9n > "$2/database.sql.gz"`)
}

// keepHub keeps the hub's keys and documents; its token opens nothing but this recording.
func (r *recording) keepHub(ctx context.Context) error {
	return r.shell(ctx,
		`tar -C "$1/hub/data" --exclude ./postgres --exclude ./registry --sort=name --mtime=@0 --owner=0 --group=0 `+
			`--numeric-owner -cf - . | gzip -9n > "$2/hub.tar.gz"`)
}

// keepNode lets the node run on without its hub for a while and then kills it: its disk is as a power cut leaves it.
func (r *recording) keepNode(ctx context.Context) error {
	if err := r.hub.Stop(); err != nil {
		return err
	}
	again, err := devcluster.StartAgent(ctx, r.agent.Config)
	if err != nil {
		return err
	}
	r.agent = again
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(unsentFor):
	}
	if err := r.agent.Kill9(); err != nil {
		return err
	}
	return r.shell(ctx,
		`tar -C "$1/node/data" --sparse --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -cf - . | gzip -9n > `+
			`"$2/node.tar.gz"`)
}

func (r *recording) shell(ctx context.Context, script string) error {
	out, err := exec.CommandContext(ctx, "bash", "-o", "pipefail", "-ec", script, "bash", r.dir, r.out).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, strings.TrimSpace(string(out)))
	}
	return nil
}

// end stops what runs and removes it from the machine.
func (r *recording) end() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var errs []error
	if r.agent != nil {
		errs = append(errs, r.agent.Stop(), devcluster.Uninstall(ctx, r.agent.Config))
	}
	if r.hub != nil {
		errs = append(errs, r.hub.Stop())
	}
	return errors.Join(errs...)
}
