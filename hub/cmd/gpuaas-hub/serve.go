package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/gpuaas/gpuaas/hub/internal/delivery"
	"github.com/gpuaas/gpuaas/hub/internal/dispatch"
	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/periodic"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/pkg/telemetry"
)

// config has the flags of `serve`; other commands use those about the database.
type config struct {
	dataDir             string
	registryDir         string
	registryMinFree     byteSize
	listen              string
	sessionListen       string
	advertiseAPI        string
	advertiseSession    string
	tlsNames            []string
	databaseURLFile     string
	postgresBinDir      string
	leaseDuration       time.Duration
	certificateLifetime time.Duration
	tokenTTLSeconds     int
	serverLifetime      time.Duration
	resync              time.Duration
	retention           periodic.Retention
	postingInterval     time.Duration
	webhookNetworks     []string
	identity            identityConfig
	metricsListen       string
	logLevel            string
	logFormat           string
}

// heapFloorBytes lets the heap grow by as much more between two collections. A hub with few nodes has a small heap: it
// would be collected after every few hundred requests, which took a sixth of its processor time.
const heapFloorBytes = 32 << 20

// heapFloor is memory that counts as live and that nobody touches, so that it takes no page of the machine.
func heapFloor() []byte { return make([]byte, heapFloorBytes) }

func newServe() *cobra.Command {
	c := config{registryMinFree: defaultRegistryMinFree, retention: periodic.DefaultRetention()}
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run the hub (the default)",
		Long: `Runs the hub until SIGTERM. Without --database-url-file it starts a private PostgreSQL below
the data directory. When it serves it prints one JSON line on standard output; logs go to standard
error. SIGHUP makes it reload keys and sync all nodes at once.

Every flag --foo-bar can also be given as the environment variable GPUAAS_HUB_FOO_BAR.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := c.check(); err != nil {
				return err
			}
			// Absolute, because the ready line names files for programs with another working directory.
			dir, err := filepath.Abs(c.dataDir)
			if err != nil {
				return err
			}
			c.dataDir = dir
			log, err := telemetry.NewLogger(cmd.ErrOrStderr(), telemetry.LogConfig{Format: c.logFormat, Level: c.logLevel})
			if err != nil {
				return fault.New(fault.Malformed, codeLogFlagsInvalid, "--log-format is json or text, --log-level is debug, "+
					"info, warn or error.", err)
			}
			defer runtime.KeepAlive(heapFloor())
			hangup := make(chan os.Signal, 1)
			signal.Notify(hangup, syscall.SIGHUP)
			defer signal.Stop(hangup)
			return serve(cmd.Context(), c, log, cmd.OutOrStdout(), hangup)
		},
	}
	f := cmd.Flags()
	f.StringVar(&c.dataDir, "data-dir", defaultDataDir, "directory of the hub's data")
	f.StringVar(&c.registryDir, "registry-dir", "", "directory of the registry's content, better not on the database's "+
		"file system (default: registry below --data-dir)")
	f.Var(&c.registryMinFree, "registry-min-free", "space that pushes leave free on the file system of --registry-dir, "+
		"like 5GiB; a push that needs it gets 507; 0 leaves none")
	f.StringVar(&c.listen, "listen", "127.0.0.1:8443", "HOST:PORT of the REST API and the registry (HTTPS)")
	f.StringVar(&c.sessionListen, "session-listen", "127.0.0.1:8443", "HOST:PORT for the sessions of nodes (QUIC, UDP)")
	f.StringVar(&c.advertiseAPI, "advertise-api", "", "HOST:PORT under which clients and nodes reach the API; set it "+
		"where the hub is behind an address translation or listens on all addresses (default: --listen)")
	f.StringVar(&c.advertiseSession, "advertise-session", "", "HOST:PORT under which nodes reach the hub for their "+
		"sessions (default: --session-listen)")
	f.StringSliceVar(&c.tlsNames, "tls-name", nil, "further DNS name or IP address in the HTTPS certificate; init "+
		"--tls-name must permit it (repeatable; default: the advertised host)")
	f.StringVar(&c.databaseURLFile, "database-url-file", "", "file with the URL of a PostgreSQL or CockroachDB "+
		"database; the engine chosen first stays (default: a private PostgreSQL)")
	f.StringVar(&c.postgresBinDir, "postgres-bin-dir", "", "directory with initdb and postgres (default: found on the "+
		"machine)")
	f.DurationVar(&c.leaseDuration, "lease-duration", dispatch.DefaultLease, "how long a node may run a workload "+
		"without hearing from the hub, 15m to 168h")
	f.DurationVar(&c.certificateLifetime, "certificate-lifetime", 24*time.Hour, "lifetime of node certificates, 15s to "+
		"168h; nodes renew at half of it")
	f.IntVar(&c.tokenTTLSeconds, "auth-service-account-token-ttl-seconds", int(iam.DefaultTokenTTL/time.Second),
		"how long tokens of service accounts count, 60 to 3600 seconds")
	f.DurationVar(&c.serverLifetime, "server-certificate-lifetime", 30*24*time.Hour, "lifetime of the hub's own "+
		"certificate, 24h to 2160h")
	f.DurationVar(&c.resync, "resync", 30*time.Second, "how often the hub checks everything again without a cause, "+
		"100ms to 1h")
	retentionFlags(f, &c.retention)
	f.DurationVar(&c.postingInterval, "posting-interval", periodic.DefaultPostingInterval,
		"how often a member's usage is written to the journal, 1s to 24h; it is charged at once")
	f.StringSliceVar(&c.webhookNetworks, "webhook-allow-network", nil, "network that webhooks may reach although it is "+
		"not public, like 10.1.0.0/16 (repeatable)")
	c.identity.add(f)
	f.StringVar(&c.metricsListen, "metrics-listen", "", "loopback HOST:PORT for Prometheus at /metrics (default: off)")
	f.StringVar(&c.logLevel, "log-level", "info", "debug, info, warn or error")
	f.StringVar(&c.logFormat, "log-format", "json", "json or text")
	return cmd
}

func (c config) check() error {
	bad := func(flag, reason string) error {
		return fault.New(fault.Malformed, fault.CodeFlagInvalid, fmt.Sprintf("--%s %s.", flag, reason), nil)
	}
	for flag, addr := range map[string]string{
		"listen": c.listen, "session-listen": c.sessionListen,
		"advertise-api": c.advertiseAPI, "advertise-session": c.advertiseSession, "metrics-listen": c.metricsListen,
	} {
		if addr == "" && flag != "listen" && flag != "session-listen" {
			continue
		}
		if _, port, err := net.SplitHostPort(addr); err != nil || !isPort(port) {
			return bad(flag, "needs HOST:PORT, like 127.0.0.1:8443")
		}
	}
	// Nodes keep what they are told at enrollment, and to them such a host is their own machine.
	for flag, addr := range map[string]string{
		"advertise-api": c.advertiseAPI, "advertise-session": c.advertiseSession,
	} {
		host, _, _ := net.SplitHostPort(addr)
		if ip := net.ParseIP(host); addr != "" && (strings.TrimSpace(host) == "" || ip != nil && ip.IsUnspecified()) {
			return bad(flag, "needs the host that others reach, like hub.example.com:8443")
		}
	}
	switch {
	case c.leaseDuration < 15*time.Minute || c.leaseDuration > 7*24*time.Hour:
		return bad("lease-duration", "must be between 15m and 168h")
	case c.certificateLifetime < 15*time.Second || c.certificateLifetime > 7*24*time.Hour:
		return bad("certificate-lifetime", "must be between 15s and 168h")
	case c.tokenTTL() < iam.MinTokenTTL || c.tokenTTL() > iam.MaxTokenTTL:
		return bad("auth-service-account-token-ttl-seconds", "must be between 60 and 3600")
	case c.serverLifetime < 24*time.Hour || c.serverLifetime > 90*24*time.Hour:
		return bad("server-certificate-lifetime", "must be between 24h and 2160h")
	case c.resync < 100*time.Millisecond || c.resync > time.Hour:
		return bad("resync", "must be between 100ms and 1h")
	}
	if err := c.identity.check(); err != nil {
		return err
	}
	if c.postingInterval < periodic.MinPostingInterval || c.postingInterval > periodic.MaxPostingInterval {
		return bad("posting-interval", "must be between 1s and 24h")
	}
	for flag, d := range c.retentions() {
		if d < periodic.MinRetention {
			return bad(flag, "must be 24h or longer")
		}
	}
	for _, text := range c.webhookNetworks {
		if _, err := netip.ParsePrefix(text); err != nil {
			return bad("webhook-allow-network", "must be a network, like 10.1.0.0/16")
		}
	}
	if c.metricsListen != "" {
		host, _, _ := net.SplitHostPort(c.metricsListen)
		if ip := net.ParseIP(host); host != "localhost" && (ip == nil || !ip.IsLoopback()) {
			return bad("metrics-listen", "must be a loopback address: metrics are served without authentication")
		}
	}
	return nil
}

// tokenTTL is how long tokens of service accounts count.
func (c config) tokenTTL() time.Duration { return time.Duration(c.tokenTTLSeconds) * time.Second }

func retentionFlags(f *pflag.FlagSet, r *periodic.Retention) {
	f.DurationVar(&r.Events, "retention-events", r.Events, "how long events stay, 24h or longer")
	f.DurationVar(&r.Audit, "retention-audit", r.Audit, "how long rows of the audit trail stay, 24h or longer")
	f.DurationVar(&r.Leases, "retention-leases", r.Leases, "how long a lease stays after its end, and the last ones "+
		"after the member's settlement, 24h or longer")
	f.DurationVar(&r.Suspense, "retention-suspense", r.Suspense, "how long usage records in suspense stay, and usage "+
		"segments that were set aside, with their findings, 24h or longer; their sums stay for good")
	f.DurationVar(&r.History, "retention-history", r.History, "how long operations and revisions stay that are not "+
		"current, and those of a decommissioned instance, 24h or longer")
	f.DurationVar(&r.Credentials, "retention-credentials", r.Credentials, "how long join tokens, user tokens, "+
		"sessions, invitations and publish intents stay after they expired or were revoked, 24h or longer")
	f.DurationVar(&r.Segments, "retention-segments", r.Segments, "how long the usage segments stay that nodes signed, "+
		"for disputes about usage, 24h or longer")
}

// retentions are the retentions by their flags.
func (c config) retentions() map[string]time.Duration {
	r := c.retention
	return map[string]time.Duration{
		"retention-events": r.Events, "retention-audit": r.Audit, "retention-leases": r.Leases,
		"retention-suspense": r.Suspense,
		"retention-history":  r.History, "retention-credentials": r.Credentials,
		"retention-segments": r.Segments,
	}
}

// webhookAddresses are those that webhooks may reach; check has refused what is no network.
func (c config) webhookAddresses() delivery.Addresses {
	var a delivery.Addresses
	for _, text := range c.webhookNetworks {
		if p, err := netip.ParsePrefix(text); err == nil {
			a.Allowed = append(a.Allowed, p)
		}
	}
	return a
}

func isPort(s string) bool {
	n, err := strconv.Atoi(s)
	return err == nil && n >= 0 && n <= 65535
}

// databaseURL reads the file; empty means a private database.
func (c config) databaseURL() (string, error) {
	if c.databaseURLFile == "" {
		return "", nil
	}
	data, err := os.ReadFile(c.databaseURLFile)
	if err != nil {
		return "", fault.New(fault.Malformed, codeDatabaseURLUnreadable, "The file "+c.databaseURLFile+
			" with the database URL cannot be read.", err)
	}
	url := strings.TrimSpace(string(data))
	if url == "" {
		return "", fault.New(fault.Malformed, codeDatabaseURLEmpty, "The file "+c.databaseURLFile+
			" is empty; it should hold postgres://user:password@host:port/name.", nil)
	}
	return url, nil
}

// advertised is how others reach a listener: as the operator says, otherwise as it listens.
func advertised(flag string, listener net.Addr) (string, error) {
	host, realPort, err := net.SplitHostPort(listener.String())
	if err != nil {
		return "", err
	}
	if flag != "" {
		host, port, err := net.SplitHostPort(flag)
		if err != nil {
			return "", err
		}
		if port == "0" {
			port = realPort
		}
		return net.JoinHostPort(host, port), nil
	}
	if ip := net.ParseIP(host); ip != nil && ip.IsUnspecified() {
		if host, err = os.Hostname(); err != nil {
			return "", err
		}
	}
	return net.JoinHostPort(host, realPort), nil
}

// ready is the line that says: the hub serves.
type ready struct {
	Ready           bool   `json:"ready"`
	APIURL          string `json:"api_url"`
	SessionAddr     string `json:"session_addr"`
	CAFile          string `json:"ca_file"`
	TokenFile       string `json:"token_file"`
	RootFingerprint string `json:"root_fingerprint"`
	MetricsURL      string `json:"metrics_url,omitempty"`
}

func (r ready) print(w io.Writer) error { return json.NewEncoder(w).Encode(r) }

// registryPath is the directory of the registry's content.
func (c config) registryPath() string {
	if c.registryDir != "" {
		return c.registryDir
	}
	return filepath.Join(c.dataDir, "registry")
}

// tokenFile holds the first admin's token.
func (c config) tokenFile() string { return filepath.Join(c.dataDir, "admin-token") }

// showToken prints the admin token, once, when it was made. Not into the journal: what is printed there is kept.
func showToken(w io.Writer, token, file string) {
	if os.Getenv("JOURNAL_STREAM") != "" {
		_, _ = fmt.Fprintf(w, "The admin token is in %s.\n", file)
		return
	}
	_, _ = fmt.Fprintf(w, "The admin token (shown this once, kept in %s):\n%s\n", file, token)
}

// serve runs the hub until ctx ends.
func serve(ctx context.Context, c config, log logger, stdout io.Writer, hangup <-chan os.Signal) (err error) {
	h, err := open(ctx, c, log, stdout)
	if err != nil {
		return err
	}
	defer func() {
		if closeErr := h.close(); err == nil {
			err = closeErr
		}
	}()
	return h.run(ctx, stdout, hangup)
}
