// Command app is the small web app that the demo ships and the end-to-end tests use: it says hello, says who it runs
// as, and can be slow, unready, hungry or dead on request. It needs nothing but its own binary.
package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	defaultAddr = ":8080"
	// maxSlow bounds /slow and /spin.
	maxSlow = 10 * time.Minute
	// drainTime is how long requests in flight may take after the signal to stop.
	drainTime = 3 * time.Second
)

func main() {
	if len(os.Args) > 1 {
		os.Exit(runTool(os.Args[1], os.Args[2:]))
	}
	if err := run(); err != nil {
		slog.Error("app", "error", err)
		os.Exit(1)
	}
}

func run() error {
	slog.SetDefault(slog.New(slog.NewJSONHandler(os.Stdout, nil)))
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if os.Getenv("IGNORE_TERM") == "true" {
		ctx = context.Background()
	}
	a, err := newApp(os.Getenv, time.Now())
	if err != nil {
		return err
	}
	go a.reloadOnHangup(ctx)
	addr := os.Getenv("ADDR")
	if addr == "" {
		addr = defaultAddr
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	server := &http.Server{Handler: a.handler(), ReadHeaderTimeout: 5 * time.Second}
	slog.Info("listening", "addr", listener.Addr().String(), "uid", os.Getuid(), "pid", os.Getpid())
	done := make(chan error, 1)
	go func() { done <- server.Serve(listener) }()
	select {
	case err := <-done:
		return err
	case code := <-a.exit:
		slog.Info("exiting as asked", "code", code)
		os.Exit(code)
	case <-ctx.Done():
	}
	slog.Info("stopping")
	drain, cancel := context.WithTimeout(context.Background(), drainTime)
	defer cancel()
	if err := server.Shutdown(drain); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return nil
}

// app holds what the handlers share.
type app struct {
	greeting string
	started  time.Time
	readyAt  time.Time
	requests atomic.Int64
	exit     chan int
	// configFile is empty where the version takes no config; config is its content when it was last loaded.
	configFile string
	config     atomic.Pointer[string]
	// secretsDir is empty where the instance has no secret parameters; secrets are those that were last loaded.
	secretsDir string
	secrets    atomic.Pointer[digests]

	mu    sync.Mutex
	eaten [][]byte
}

func newApp(getenv func(string) string, now time.Time) (*app, error) {
	a := &app{
		greeting: getenv("GREETING"), started: now, readyAt: now, exit: make(chan int, 1),
		configFile: getenv("GPUAAS_CONFIG_FILE"), secretsDir: getenv("GPUAAS_PARAMETERS_DIR"),
	}
	if a.greeting == "" {
		a.greeting = "Hello from GPUaaS"
	}
	if err := a.load(); err != nil {
		return nil, err
	}
	if text := getenv("READY_AFTER_MILLIS"); text != "" {
		millis, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("READY_AFTER_MILLIS: %w", err)
		}
		a.readyAt = now.Add(time.Duration(millis) * time.Millisecond)
	}
	return a, nil
}

func (a *app) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprintln(w, a.greeting) })
	mux.HandleFunc("GET /healthz", a.health)
	mux.HandleFunc("GET /whoami", a.whoami)
	mux.HandleFunc("GET /config", a.showConfig)
	mux.HandleFunc("GET /secrets", a.showSecrets)
	mux.HandleFunc("GET /identity", a.identity)
	mux.HandleFunc("GET /slow", a.slow)
	mux.HandleFunc("GET /send", a.send)
	mux.HandleFunc("POST /digest", a.digest)
	mux.HandleFunc("POST /spin", a.spin)
	mux.HandleFunc("POST /allocate", a.allocate)
	mux.HandleFunc("POST /log", a.log)
	mux.HandleFunc("POST /exit", a.leave)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a.requests.Add(1)
		mux.ServeHTTP(w, r)
		if r.URL.Path != "/healthz" {
			slog.Info("request", "method", r.Method, "path", r.URL.Path)
		}
	})
}

func (a *app) health(w http.ResponseWriter, _ *http.Request) {
	if time.Now().Before(a.readyAt) {
		http.Error(w, "not ready yet", http.StatusServiceUnavailable)
		return
	}
	_, _ = fmt.Fprintln(w, "ok")
}

func (a *app) readConfig() (string, error) {
	if a.configFile == "" {
		return "", nil
	}
	content, err := os.ReadFile(a.configFile)
	return string(content), err
}

// load reads the config and the secret parameters.
func (a *app) load() error {
	config, err := a.readConfig()
	if err != nil {
		return err
	}
	secrets, err := a.readSecrets()
	if err != nil {
		return err
	}
	a.config.Store(&config)
	a.secrets.Store(&secrets)
	return nil
}

func (a *app) reloadOnHangup(ctx context.Context) {
	hangup := make(chan os.Signal, 1)
	signal.Notify(hangup, syscall.SIGHUP)
	for {
		select {
		case <-hangup:
			if err := a.load(); err != nil {
				slog.Error("config and secrets stay as they were", "error", err)
			}
		case <-ctx.Done():
			return
		}
	}
}

// showConfig shows the config that was loaded at the start or the last SIGHUP, and the file's content now.
func (a *app) showConfig(w http.ResponseWriter, _ *http.Request) {
	file, err := a.readConfig()
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]string{"loaded": *a.config.Load(), "file": file})
}

// whoami tells what the container sees of itself.
func (a *app) whoami(w http.ResponseWriter, _ *http.Request) {
	hostname, _ := os.Hostname()
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]any{
		"hostname": hostname, "pid": os.Getpid(), "uid": os.Getuid(), "gid": os.Getgid(),
		"started_at": a.started.UTC().Format(time.RFC3339Nano),
		"requests":   a.requests.Load(), "root_writable": writable("/"), "tmp_writable": writable("/tmp"),
	})
}

func writable(dir string) bool {
	f, err := os.CreateTemp(dir, "probe")
	if err != nil {
		return false
	}
	_ = f.Close()
	_ = os.Remove(f.Name())
	return true
}

func (a *app) slow(w http.ResponseWriter, r *http.Request) {
	d, ok := duration(w, r)
	if !ok {
		return
	}
	select {
	case <-time.After(d):
		_, _ = fmt.Fprintln(w, "slow")
	case <-r.Context().Done():
	}
}

// spin keeps one core busy.
func (a *app) spin(w http.ResponseWriter, r *http.Request) {
	d, ok := duration(w, r)
	if !ok {
		return
	}
	var n uint64
	for end := time.Now().Add(d); time.Now().Before(end) && r.Context().Err() == nil; {
		for range 1 << 16 {
			n = n*6364136223846793005 + 1442695040888963407
		}
	}
	_, _ = fmt.Fprintln(w, n)
}

// log writes lines to standard output at a rate, and answers with how many bytes they were.
func (a *app) log(w http.ResponseWriter, r *http.Request) {
	d, ok := duration(w, r)
	if !ok {
		return
	}
	perSecond, err := strconv.Atoi(r.FormValue("bytes_per_second"))
	if err != nil || perSecond < 1 || perSecond > 1<<30 {
		http.Error(w, "bytes_per_second: 1 to 1073741824", http.StatusBadRequest)
		return
	}
	const perTick, line = 100, 128
	block := bytes.Repeat([]byte(strings.Repeat("x", line-1)+"\n"), max(perSecond/perTick/line, 1))
	tick := time.NewTicker(time.Second / perTick)
	defer tick.Stop()
	written := 0
	for start := time.Now(); time.Since(start) < d && r.Context().Err() == nil; <-tick.C {
		// A ticker drops ticks while a write waits: make up for them.
		for due := int(float64(perSecond) * time.Since(start).Seconds()); written < due; {
			n, err := os.Stdout.Write(block)
			written += n
			if err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
		}
	}
	_, _ = fmt.Fprintln(w, written)
}

func duration(w http.ResponseWriter, r *http.Request) (time.Duration, bool) {
	d, err := time.ParseDuration(r.FormValue("for"))
	if err != nil || d < 0 || d > maxSlow {
		http.Error(w, "for: a duration of at most "+maxSlow.String(), http.StatusBadRequest)
		return 0, false
	}
	return d, true
}

// allocate holds on to memory, touching every page, so that a limit can be met.
func (a *app) allocate(w http.ResponseWriter, r *http.Request) {
	mib, err := strconv.Atoi(r.FormValue("mib"))
	if err != nil || mib < 1 || mib > 1<<20 {
		http.Error(w, "mib: a number of mebibytes", http.StatusBadRequest)
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for range mib {
		block := make([]byte, 1<<20)
		for i := 0; i < len(block); i += 4096 {
			block[i] = 1
		}
		a.eaten = append(a.eaten, block)
	}
	_, _ = fmt.Fprintln(w, len(a.eaten), "MiB held")
}

func (a *app) leave(w http.ResponseWriter, r *http.Request) {
	code, err := strconv.Atoi(r.FormValue("code"))
	if err != nil || code < 0 || code > 255 {
		http.Error(w, "code: 0 to 255", http.StatusBadRequest)
		return
	}
	_, _ = fmt.Fprintln(w, "bye")
	select {
	case a.exit <- code:
	default:
	}
}
