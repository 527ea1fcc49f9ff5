package devcluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"
)

// EndLimit bounds how long a program that cannot work takes to exit.
const EndLimit = 30 * time.Second

// Ended is the exit code of a program, and all that it wrote.
type Ended struct {
	ExitCode int
	Said     string
}

// TryHub runs `gpuaas-hub serve` where it must fail, and returns how it ended. A hub that comes up is stopped and an
// error. The paths in hide are hidden from the hub.
func TryHub(ctx context.Context, c HubConfig, hide ...string) (Ended, error) {
	args := []string{"serve", "--data-dir", c.DataDir(), "--listen", c.Listen, "--session-listen", c.SessionListen}
	return try(ctx, c.binary(), append(args, c.ExtraArgs...), c.Env, hide)
}

// TryAgent is TryHub for `gpuaas-agent run`.
func TryAgent(ctx context.Context, c AgentConfig, hide ...string) (Ended, error) {
	for _, d := range []string{c.Dir, c.RunDir} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return Ended{}, err
		}
	}
	if c.JoinToken != "" {
		if err := os.WriteFile(filepath.Join(c.Dir, "join-token"), []byte(c.JoinToken), 0o600); err != nil {
			return Ended{}, err
		}
	}
	return try(ctx, c.binary(), append(c.args("run"), c.ExtraArgs...), c.Env, hide)
}

func try(ctx context.Context, path string, args, env, hide []string) (Ended, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, EndLimit, errors.New("it took too long"))
	defer cancel()
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	name := filepath.Base(path)
	path, args, err := hidden(path, args, hide)
	if err != nil {
		return Ended{}, err
	}
	said := &watched{word: []byte(`"ready":true`), seen: func() { stop(errors.New("it came up")) }}
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env = append(os.Environ(), env...)
	cmd.Stdout, cmd.Stderr = said, said
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = EndLimit
	err = cmd.Run()
	e := Ended{ExitCode: cmd.ProcessState.ExitCode(), Said: said.String()}
	if ctx.Err() != nil {
		return e, fmt.Errorf("%s did not end by itself: %w\n%s", name, context.Cause(ctx), e.Said)
	}
	if _, exited := errors.AsType[*exec.ExitError](err); err != nil && !exited {
		return e, err
	}
	return e, nil
}

// hidden wraps a command so that these files and directories are not there for it: a mount namespace of its own, where
// something empty lies over them.
func hidden(path string, args, hide []string) (string, []string, error) {
	if len(hide) == 0 {
		return path, args, nil
	}
	var script strings.Builder
	for _, h := range hide {
		info, err := os.Stat(h)
		if err != nil {
			return "", nil, err
		}
		if info.IsDir() {
			fmt.Fprintf(&script, "mount -t tmpfs -o size=64k none %q && ", h)
		} else {
			fmt.Fprintf(&script, "mount --bind /dev/null %q && ", h)
		}
	}
	script.WriteString(`exec "$0" "$@"`)
	return "unshare", append([]string{"--mount", "--propagation", "private", "sh", "-c", script.String(), path}, args...),
		nil
}

// watched keeps what is written and calls seen at a word.
type watched struct {
	mu   sync.Mutex
	buf  bytes.Buffer
	word []byte
	seen func()
}

func (w *watched) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	n, err := w.buf.Write(p)
	if bytes.Contains(w.buf.Bytes(), w.word) {
		w.seen()
	}
	return n, err
}

func (w *watched) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.buf.String()
}
