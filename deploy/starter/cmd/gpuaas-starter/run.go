package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/deploy/starter"
	"github.com/gpuaas/gpuaas/deploy/starter/rke2"
	"github.com/gpuaas/gpuaas/deploy/starter/slurm"
	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/pkg/daemon"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
	"github.com/gpuaas/gpuaas/pkg/worker"
)

// maxKeyFileBytes bounds the file of the service account.
const maxKeyFileBytes = 64 << 10

// settings are the flags.
type settings struct {
	controller, hubURL, hubCA, account, project, instance, machines, name string
	reportEvery                                                           time.Duration
}

func newRun() *cobra.Command {
	var s settings
	c := &cobra.Command{
		Use: "run", Short: "Operate one app instance until it has ended", Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return s.run(c.Context()) },
	}
	f := c.Flags()
	f.StringVar(&s.controller, "controller", "", "slurm, or rke2, whose steps on the cluster are stand-ins")
	f.StringVar(&s.hubURL, "hub-url", "", "the hub, like https://hub.example.com:8443")
	f.StringVar(&s.hubCA, "hub-ca", "", "PEM file with the hub's authority (default: the system's authorities)")
	f.StringVar(&s.account, "service-account", "", "file that gpuaas sa create --save wrote, of an app_operator")
	f.StringVar(&s.project, "project", "", "id of the project")
	f.StringVar(&s.instance, "instance", "", "id of the app instance")
	f.StringVar(&s.machines, "machines", "", "YAML file with address, shell and cpus of the machine of each allocation")
	f.StringVar(&s.name, "name", "", "tells apart the processes of one service account (default: a random one)")
	f.DurationVar(&s.reportEvery, "report-every", worker.DefaultReportEvery, "how often members are reported (slurm)")
	return c
}

// run operates the instance. That it was asked to stop is no error: the task that it had passes on with its lease.
func (s settings) run(ctx context.Context) error {
	w, err := s.worker()
	if err != nil {
		return err
	}
	defer w.Hub.Close()
	log, err := telemetry.NewLogger(os.Stderr, telemetry.LogConfig{})
	if err != nil {
		return err
	}
	stop, err := telemetry.StartTraces(ctx, telemetry.Program{
		Service: program, Version: daemon.Version(), Instance: s.instance,
	}, log)
	if err != nil {
		return err
	}
	defer stop()
	if err := s.check(ctx, w.Hub); err != nil {
		return err
	}
	w.OnError = func(err error) { log.WarnContext(ctx, "the worker goes on", slog.Any("error", err)) }
	log.InfoContext(ctx, "operating", slog.String("controller", s.controller),
		slog.String("app_instance_id", s.instance))
	err = w.Run(ctx)
	if ctx.Err() != nil {
		log.InfoContext(ctx, "stopped")
		return nil
	}
	if err == nil {
		log.InfoContext(ctx, "the app instance has ended")
	}
	return err
}

// worker is made of files and flags; nothing is sent yet.
func (s settings) worker() (*worker.Worker, error) {
	for _, required := range []struct{ flag, value string }{
		{"controller", s.controller},
		{"hub-url", s.hubURL},
		{"service-account", s.account},
		{"project", s.project},
		{"instance", s.instance},
		{"machines", s.machines},
	} {
		if required.value == "" {
			return nil, fmt.Errorf("--%s is missing; see `%s run --help`", required.flag, program)
		}
	}
	machines, err := starter.FromFile(s.machines)
	if err != nil {
		return nil, err
	}
	w := &worker.Worker{ProjectID: s.project, InstanceID: s.instance, Name: s.name, ReportEvery: s.reportEvery}
	switch s.controller {
	case "slurm":
		c := &slurm.Controller{Machines: machines}
		w.Handle, w.Members = c.Handle, c.Members
	case "rke2":
		w.Handle = (&rke2.Controller{Machines: machines}).Handle
	default:
		return nil, errors.New("--controller must be slurm or rke2")
	}
	conf := client.Config{URL: s.hubURL, CAFile: s.hubCA, UserAgent: program}
	account, err := readAccount(s.account)
	if err != nil {
		return nil, err
	}
	if conf.Credential, err = client.NewServiceAccountCredential(conf, account.ID, account.Key.KeyID,
		[]byte(account.Key.PrivateKeyPem)); err != nil {
		return nil, err
	}
	w.Hub, err = client.Open(conf)
	return w, err
}

// readAccount reads the file that the account's creation wrote. Others must not be able to read its key.
func readAccount(path string) (account client.ServiceAccount, err error) {
	info, err := os.Stat(path)
	if err != nil {
		return account, fmt.Errorf("read the service account: %w", err)
	}
	if info.Mode().Perm()&0o077 != 0 {
		return account, fmt.Errorf("%s can be read by others and holds a key; run: chmod 600 %s", path, path)
	}
	if info.Size() > maxKeyFileBytes {
		return account, fmt.Errorf("%s is larger than %d bytes", path, maxKeyFileBytes)
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return account, fmt.Errorf("read the service account: %w", err)
	}
	if account, err = client.ParseServiceAccount(text); err != nil {
		return account, fmt.Errorf("%s is %w", path, err)
	}
	return account, nil
}

// check reads the instance once, so that settings that can never work end the program. A hub that is away does not: the
// worker waits for it.
func (s settings) check(ctx context.Context, hub *client.Hub) error {
	i, err := client.Read[client.AppInstance](hub.GetAppInstance(ctx, s.project, s.instance))
	problem, refused := errors.AsType[*client.Problem](err)
	if refused && problem.Status < http.StatusInternalServerError && problem.Status != http.StatusTooManyRequests {
		return fmt.Errorf("the hub does not let the service account of %s read the app instance: %w", s.account, err)
	}
	if err != nil {
		return nil //nolint:nilerr // it passes
	}
	backend := map[string]client.RuntimeBackend{
		"slurm": client.RuntimeBackendSlurm, "rke2": client.RuntimeBackendK8S,
	}[s.controller]
	if i.RuntimeBackend != backend {
		return fmt.Errorf("the app instance has the backend %s, and --controller %s operates %s", i.RuntimeBackend,
			s.controller, backend)
	}
	return nil
}
