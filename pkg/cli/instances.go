package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/pkg/client"
)

func instanceColumns() []column[client.AppInstance] {
	return []column[client.AppInstance]{
		{"NAME", func(i client.AppInstance) string { return i.DisplayName }},
		{"APP", func(i client.AppInstance) string { return i.AppSlug + " " + i.Version }},
		{"STATUS", statusOf},
		{"HEALTH", func(i client.AppInstance) string { return string(i.Health) }},
		{"ENDPOINT", func(i client.AppInstance) string {
			urls := make([]string, len(i.Endpoints))
			for n, e := range i.Endpoints {
				urls[n] = e.URL
			}
			return strings.Join(urls, " ")
		}},
		{"ID", func(i client.AppInstance) string { return i.ID }},
		{"CREATED", func(i client.AppInstance) string { return stamp(i.CreatedAt) }},
	}
}

func statusOf(i client.AppInstance) string {
	if i.StatusReason != "" {
		return string(i.Status) + " (" + string(i.StatusReason) + ")"
	}
	return string(i.Status)
}

// pullOf says how far the pulls of an instance's images are; it is empty where none is under way.
func pullOf(i client.AppInstance) string {
	var (
		done, total int64
		phase       int
		pulling     bool
	)
	phases := []client.ImagePullPhase{
		client.ImagePullPhaseUnpacking, client.ImagePullPhaseFetching, client.ImagePullPhaseResolving,
	}
	for _, m := range i.Members {
		p := m.ImagePull
		if p.Phase == "" {
			continue
		}
		pulling = true
		done, total = done+p.DoneBytes, total+p.TotalBytes
		phase = max(phase, slices.Index(phases, p.Phase))
	}
	switch {
	case !pulling:
		return ""
	case total == 0:
		return string(phases[phase]) + " the image"
	default:
		return fmt.Sprintf("%s the image, %d of %d MiB", phases[phase], done>>20, total>>20)
	}
}

func (a *app) instancesCommand() *cobra.Command {
	var status, slug string
	list := projectListing(a, "list", "App instances of the project", cobra.NoArgs, instanceColumns(),
		func(ctx context.Context, s *session, project string, _ []string,
			cursor string,
		) (*http.Response, error) {
			return s.hub.ListAppInstances(ctx, project, &client.ListAppInstancesParams{
				Cursor: cursor, Limit: client.PageSize, Status: client.AppInstanceStatus(status), AppSlug: slug,
			}, s.editors()...)
		})
	list.Flags().StringVar(&status, "status", "", "only those with this status")
	list.Flags().StringVar(&slug, "app", "", "only those of this app")
	get := a.instanceAction("get", "One app instance", func(ctx context.Context, s *session, project, id string) error {
		i, err := client.Read[client.AppInstance](s.hub.GetAppInstance(ctx, project, id, s.editors()...))
		if err != nil {
			return err
		}
		columns := instanceColumns()
		if pullOf(i) != "" {
			columns = append(columns, column[client.AppInstance]{"PULL", pullOf})
		}
		err = show(s, i, append(columns,
			column[client.AppInstance]{"SPENT", func(i client.AppInstance) string {
				return strings.TrimSpace(i.Cost.Spent + " " + i.Cost.Currency)
			}},
			column[client.AppInstance]{"PER HOUR", func(i client.AppInstance) string { return i.Cost.PerHour }}))
		if err != nil || s.output != "table" {
			return err
		}
		if err := showServices(s, i); err != nil {
			return err
		}
		for _, e := range i.Endpoints {
			for _, command := range []string{e.Instructions.PortForward, e.Instructions.SSHTunnel} {
				if command != "" {
					fmt.Fprintf(s.env.Stdout, "%s: %s\n", printable(e.Name), printable(command))
				}
			}
		}
		return nil
	})
	return group("instances", "App instances: create, watch, look into, upgrade, roll back, stop, start, decommission",
		a.createInstanceCommand(), a.estimateCommand(), list, get, a.watchCommand(), a.upgradeCommand(), a.rollbackCommand(),
		a.stopCommand(), a.startCommand(), a.setCommand(), a.decommissionCommand(), a.eventsCommand(), a.tasksCommand(),
		a.membersCommand(), a.logsCommand())
}

// instanceAction is a leaf about one app instance, by id or display name.
func (a *app) instanceAction(verb, short string, run func(ctx context.Context, s *session, project,
	id string) error,
) *cobra.Command {
	return a.projectAction(verb+" INSTANCE", short, cobra.ExactArgs(1), func(ctx context.Context, s *session,
		project string, args []string,
	) error {
		id, err := s.instanceID(ctx, project, args[0])
		if err != nil {
			return err
		}
		return run(ctx, s, project, id)
	})
}

// estimateCommand says what an app costs before it is launched.
func (a *app) estimateCommand() *cobra.Command {
	var (
		version string
		p       client.EstimateCostParams
	)
	columns := []column[client.CostEstimate]{
		{"CPU MILLIS", func(e client.CostEstimate) string { return strconv.FormatInt(e.CPUMillis, 10) }},
		{"MEMORY MIB", func(e client.CostEstimate) string { return strconv.FormatInt(e.MemoryBytes>>20, 10) }},
		{"PER HOUR", func(e client.CostEstimate) string { return e.PerHour + " " + e.Currency }},
		{"OF THAT", func(e client.CostEstimate) string {
			parts := make([]string, len(e.Rates))
			for n, r := range e.Rates {
				parts[n] = r.PerHour + " " + r.Meter
			}
			return strings.Join(parts, ", ")
		}},
	}
	c := a.projectAction("estimate APP", "What an app costs at most in an hour, before it is launched", cobra.ExactArgs(1),
		func(ctx context.Context, s *session, project string, args []string) (err error) {
			v := version
			if v == "" {
				if v, err = s.latestVersion(ctx, args[0]); err != nil {
					return err
				}
			}
			return showAnswer(s, columns)(s.hub.EstimateCost(ctx, project, args[0], v, &p, s.editors()...))
		})
	c.Flags().StringVar(&version, "version", "", "version (default: the newest active one)")
	c.Flags().StringVar(&p.AllocationID, "allocation", "", "id of the allocation that it would run on")
	c.Flags().Int32Var(&p.Accelerators, "accelerators", 0, "number of accelerators (0: the version's default)")
	c.Flags().StringVar((*string)(&p.AcceleratorSharing), "accelerator-sharing", "", sharingUsage)
	c.Flags().Int64Var(&p.CPUMillis, "cpu-millis", 0, cpuUsage)
	c.Flags().Int64Var(&p.MemoryMib, "memory-mib", 0, memoryUsage)
	c.Flags().StringArrayVar(&p.Requirement, "requirement", nil, requirementUsage)
	return c
}

func (a *app) createInstanceCommand() *cobra.Command {
	var (
		body                   client.AppInstanceCreate
		mode, scope            string
		params                 []string
		paramsFile, configFile string
		allocations            []string
		wait                   bool
		resources              *resourceChoice
	)
	c := a.action("create APP", "Deploy an app", cobra.ExactArgs(1), func(ctx context.Context, s *session,
		args []string,
	) (err error) {
		body.AppSlug = args[0]
		body.DisplayName = or(body.DisplayName, args[0])
		body.OperatingMode, body.ControlPlaneScope = client.OperatingMode(mode), client.ControlPlaneScope(scope)
		body.PlacementIntent.AllocationIds = allocations
		body.Resources = resources.chosen()
		if body.Environment, err = resources.environment(s.env.Stdin); err != nil {
			return err
		}
		if body.Parameters, err = parameters(s.env.Stdin, paramsFile, params); err != nil {
			return err
		}
		if body.Config, err = parameters(s.env.Stdin, configFile, nil); err != nil {
			return err
		}
		project, err := s.projectID(ctx)
		if err != nil {
			return err
		}
		if body.Ports, body.Volumes, err = resources.portsAndVolumes(ctx, s, project); err != nil {
			return err
		}
		if body.Version == "" {
			if body.Version, err = s.latestVersion(ctx, args[0]); err != nil {
				return err
			}
		}
		i, err := client.Read[client.AppInstance](s.hub.CreateAppInstance(ctx, project, body, s.editors()...))
		if err != nil {
			return err
		}
		for _, h := range i.HintResults {
			if h.Requested != h.Effective {
				s.progress.note(fmt.Sprintf("%s is %s, not %s: %s", h.Field, h.Effective, h.Requested, h.Reason))
			}
		}
		if wait {
			if i, err = s.waitFor(ctx, project, i.ID, client.AppInstanceStatusRunning); err != nil {
				return err
			}
		}
		return show(s, i, instanceColumns())
	})
	f := c.Flags()
	f.StringVar(&body.Version, "version", "", "version (default: the newest active one)")
	f.StringVar(&body.DisplayName, "name", "", "display name (default: the app's slug)")
	f.StringVar(&mode, "operating-mode", "", "hint: tenant_dedicated or platform_managed")
	f.StringVar(&scope, "control-plane-scope", "", "hint: project, tenant or platform")
	f.StringSliceVar(&allocations, "allocation", nil, "id of the allocation to run on (default: the only one with room)")
	f.StringArrayVar(&params, "param", nil, "launch parameter NAME=VALUE; VALUE is JSON, or else text (repeatable)")
	f.StringVar(&paramsFile, "params-file", "", "JSON object with launch parameters; - for stdin")
	f.StringVar(&configFile, "config-file", "", "JSON object with the app's config; - for stdin")
	f.BoolVar(&wait, "wait", false, "wait until it is running")
	resources = resourceFlags(f)
	return c
}

func (s *session) latestVersion(ctx context.Context, slug string) (string, error) {
	for app, err := range client.All[client.App](func(cursor string) (*http.Response, error) {
		return s.hub.ListApps(ctx, &client.ListAppsParams{Cursor: cursor, Limit: client.PageSize})
	}) {
		if err != nil {
			return "", err
		}
		if app.Slug == slug && app.LatestVersion != "" {
			return app.LatestVersion, nil
		}
	}
	return "", &client.Problem{Status: 404, Code: "not_found", Detail: fmt.Sprintf("There is no app %q with an active "+
		"version; gpuaas apps list shows what there is.", slug)}
}

// waitFor watches an instance and says each change.
func (s *session) waitFor(ctx context.Context, project, id string,
	want client.AppInstanceStatus,
) (client.AppInstance, error) {
	var before client.AppInstance
	return s.hub.FollowInstance(ctx, project, id, want, func(i client.AppInstance) {
		if i.Status != before.Status || i.StatusReason != before.StatusReason || i.Health != before.Health {
			s.progress.note(statusOf(i))
		}
		before = i
		s.progress.now(cmp.Or(pullOf(i), "waiting until the app instance is "+string(want)))
	})
}

func (a *app) watchCommand() *cobra.Command {
	until := string(client.AppInstanceStatusRunning)
	c := a.instanceAction("watch", "Follow an app instance until it has a status", func(ctx context.Context, s *session,
		project, id string,
	) error {
		if !client.AppInstanceStatus(until).Valid() {
			return usage(errors.New("--until is no status of an app instance"))
		}
		i, err := s.waitFor(ctx, project, id, client.AppInstanceStatus(until))
		if err != nil {
			return err
		}
		return show(s, i, instanceColumns())
	})
	c.Flags().StringVar(&until, "until", until, "status to wait for")
	return c
}

// lifecycleAction is a leaf that asks for a step of an instance's life and, with --wait, sees it through.
func (a *app) lifecycleAction(verb, short string, until client.AppInstanceStatus,
	ask func(ctx context.Context, s *session, project, id string) (client.AppInstance, error),
) *cobra.Command {
	var wait bool
	c := a.instanceAction(verb, short, func(ctx context.Context, s *session, project, id string) error {
		i, err := ask(ctx, s, project, id)
		if err != nil {
			return err
		}
		if wait {
			asked := i
			if i, err = s.waitFor(ctx, project, id, until); err != nil {
				return err
			}
			if i.Revision != asked.Revision {
				return fmt.Errorf("version %s did not become ready; the app instance is back at %s as it was before (gpuaas "+
					"instances events %s says why)", asked.Version, i.Version, id)
			}
		}
		return show(s, i, instanceColumns())
	})
	c.Flags().BoolVar(&wait, "wait", false, "wait until it is "+string(until))
	return c
}

func (a *app) upgradeCommand() *cobra.Command {
	var (
		to, paramsFile, configFile string
		params                     []string
		resources                  *resourceChoice
	)
	c := a.lifecycleAction("upgrade", "Bring an app instance to another version or size, where it is",
		client.AppInstanceStatusRunning,
		func(ctx context.Context, s *session, project, id string) (client.AppInstance, error) {
			if to == "" {
				now, err := client.Read[client.AppInstance](s.hub.GetAppInstance(ctx, project, id, s.editors()...))
				if err != nil {
					return now, err
				}
				if to, err = s.latestVersion(ctx, now.AppSlug); err != nil {
					return now, err
				}
			}
			body := client.AppInstanceUpgrade{TargetVersion: to, Resources: resources.chosen()}
			var err error
			if body.Ports, body.Volumes, err = resources.portsAndVolumes(ctx, s, project); err != nil {
				return client.AppInstance{}, err
			}
			if body.Environment, err = resources.environment(s.env.Stdin); err != nil {
				return client.AppInstance{}, err
			}
			if body.Parameters, err = parameters(s.env.Stdin, paramsFile, params); err != nil {
				return client.AppInstance{}, err
			}
			if body.Config, err = parameters(s.env.Stdin, configFile, nil); err != nil {
				return client.AppInstance{}, err
			}
			return client.Read[client.AppInstance](s.hub.UpgradeAppInstance(ctx, project, id, body, s.editors()...))
		})
	f := c.Flags()
	f.StringVar(&to, "to", "", "version (default: the newest active one)")
	f.StringArrayVar(&params, "param", nil, "launch parameter NAME=VALUE in place of all others (repeatable)")
	f.StringVar(&paramsFile, "params-file", "", "JSON object with all launch parameters; - for stdin")
	f.StringVar(&configFile, "config-file", "", "JSON object with the app's whole config; - for stdin")
	resources = resourceFlags(f)
	f.BoolVar(&resources.noEnvironment, "no-environment", false, "remove the environment that the instance has")
	return c
}

func (a *app) rollbackCommand() *cobra.Command {
	var to string
	c := a.lifecycleAction("rollback", "Bring an app instance back to a version that it was running",
		client.AppInstanceStatusRunning,
		func(ctx context.Context, s *session, project, id string) (client.AppInstance, error) {
			return client.Read[client.AppInstance](s.hub.RollbackAppInstance(ctx, project, id,
				client.AppInstanceRollback{TargetVersion: to}, s.editors()...))
		})
	c.Flags().StringVar(&to, "to", "", "version (default: the previous one)")
	return c
}

func (a *app) stopCommand() *cobra.Command {
	return a.lifecycleAction("stop", "End the containers of an app instance; its place stays",
		client.AppInstanceStatusStopped,
		func(ctx context.Context, s *session, project, id string) (client.AppInstance, error) {
			return client.Read[client.AppInstance](s.hub.StopAppInstance(ctx, project, id, s.editors()...))
		})
}

func (a *app) startCommand() *cobra.Command {
	return a.lifecycleAction("start", "Run a stopped app instance again", client.AppInstanceStatusRunning,
		func(ctx context.Context, s *session, project, id string) (client.AppInstance, error) {
			return client.Read[client.AppInstance](s.hub.StartAppInstance(ctx, project, id, s.editors()...))
		})
}

func (a *app) setCommand() *cobra.Command {
	var name, configFile string
	c := a.instanceAction("set", "Rename an app instance or change its config", func(ctx context.Context, s *session,
		project, id string,
	) error {
		body := client.AppInstanceChange{DisplayName: name}
		if configFile != "" {
			var err error
			if body.Config, err = parameters(s.env.Stdin, configFile, nil); err != nil {
				return err
			}
		}
		if name == "" && configFile == "" {
			return usage(errors.New("say what to change: --name or --config-file"))
		}
		return showAnswer(s, instanceColumns())(s.hub.ChangeAppInstance(ctx, project, id, body, s.editors()...))
	})
	c.Flags().StringVar(&name, "name", "", "new display name")
	c.Flags().StringVar(&configFile, "config-file", "", "JSON object with the app's whole config; - for stdin")
	return c
}

func (a *app) decommissionCommand() *cobra.Command {
	var wait bool
	c := a.instanceAction("decommission", "Stop an app instance and remove all of it", func(ctx context.Context,
		s *session, project, id string,
	) error {
		i, err := client.Read[client.AppInstance](s.hub.DecommissionAppInstance(ctx, project, id, s.editors()...))
		if err != nil {
			return err
		}
		if wait {
			if i, err = s.waitFor(ctx, project, id, client.AppInstanceStatusDecommissioned); err != nil {
				return err
			}
		}
		return show(s, i, instanceColumns())
	})
	c.Flags().BoolVar(&wait, "wait", false, "wait until the node has proven that nothing is left")
	return c
}

func (a *app) eventsCommand() *cobra.Command {
	columns := []column[client.Event]{
		{"TIME", func(e client.Event) string { return stamp(e.Time) }},
		{"TYPE", func(e client.Event) string { return e.Type }},
		{"FROM", func(e client.Event) string { return e.Data.From }},
		{"TO", func(e client.Event) string { return e.Data.To }},
		{"REASON", func(e client.Event) string { return e.Data.Reason }},
		{"CORRELATION ID", func(e client.Event) string { return e.Data.CorrelationID }},
	}
	return projectListing(a, "events INSTANCE", "What happened to an app instance, oldest first", cobra.ExactArgs(1),
		columns,
		func(ctx context.Context, s *session, project string, args []string, cursor string) (*http.Response, error) {
			id, err := s.instanceID(ctx, project, args[0])
			if err != nil {
				return nil, err
			}
			return s.hub.ListAppInstanceEvents(ctx, project, id,
				&client.ListAppInstanceEventsParams{Cursor: cursor, Limit: client.PageSize}, s.editors()...)
		})
}

func (a *app) logsCommand() *cobra.Command {
	var p client.GetAppInstanceLogsParams
	c := a.instanceAction("logs", "What an app instance wrote", func(ctx context.Context, s *session, project,
		id string,
	) error {
		res, err := s.hub.GetAppInstanceLogs(ctx, project, id, &p, s.editors()...)
		if err != nil {
			return err
		}
		defer func() { _ = res.Body.Close() }()
		s.progress.stop()
		_, err = io.Copy(s.env.Stdout, res.Body)
		return err
	})
	f := c.Flags()
	f.BoolVarP(&p.Follow, "follow", "f", false, "go on as more is written")
	f.VarP(linesFlag{&p.TailLines}, "tail", "n", "last lines only (default: what the hub gives)")
	f.Var(timeFlag{&p.Since}, "since", "only what was written after this `time`, or in a span back from now (15m)")
	f.StringVar(&p.Service, "service", "", "service of the app (default: the first)")
	f.StringVar(&p.MemberID, "member", "", "member of the app instance (default: the first)")
	return c
}
