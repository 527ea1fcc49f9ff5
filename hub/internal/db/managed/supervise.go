package managed

import (
	"bufio"
	"io"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// maxLogLine bounds one line of the server's messages; the rest of a longer one is a line of its own.
const maxLogLine = 8 << 10

// supervise keeps the server running until stop. It owns its thread: the kernel's "die with the parent" means the
// thread that started the child, and the runtime may end any other.
func (s *Server) supervise(started chan<- error) {
	defer close(s.stopped)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()

	delay := restartMin
	for first := true; ; first = false {
		born := time.Now()
		cmd, err := s.spawn()
		if first {
			started <- err
			if err != nil {
				return
			}
		}
		if err == nil {
			err = s.attend(cmd)
		}
		select {
		case <-s.stop:
			return
		default:
		}
		if time.Since(born) > stableAfter {
			delay = restartMin
		}
		s.conf.Log.Error("private PostgreSQL ended; starting it again", "error", err, "after", delay)
		select {
		case <-s.stop:
			return
		case <-time.After(delay):
		}
		delay = min(delay*2, restartMax)
	}
}

func (s *Server) spawn() (*exec.Cmd, error) {
	//nolint:noctx // its life is the supervisor's business
	cmd := exec.Command(filepath.Join(s.bin, "postgres"), "-D", s.layout.data)
	cmd.Dir = s.layout.data
	cmd.Env = childEnv()
	cmd.SysProcAttr = s.user.attributes()
	out, in := io.Pipe()
	cmd.Stdout, cmd.Stderr = in, in
	if err := cmd.Start(); err != nil {
		return nil, refuse(codeDatabaseStartFailed, "PostgreSQL cannot be started from "+s.bin+": "+reason(err)+".", err)
	}
	go s.forward(out)
	s.setPID(cmd.Process.Pid)
	return cmd, nil
}

// attend waits until the process ends, and ends it when the supervisor is stopped.
func (s *Server) attend(cmd *exec.Cmd) error {
	ended := make(chan struct{})
	escalated := make(chan struct{})
	go func() {
		defer close(escalated)
		select {
		case <-ended:
			return
		case <-s.stop:
		}
		for _, step := range []struct {
			signal syscall.Signal
			wait   time.Duration
		}{{syscall.SIGINT, fastStop}, {syscall.SIGQUIT, 5 * time.Second}, {syscall.SIGKILL, 5 * time.Second}} {
			_ = cmd.Process.Signal(step.signal)
			select {
			case <-ended:
				return
			case <-time.After(step.wait):
			}
		}
	}()
	err := cmd.Wait()
	close(ended)
	<-escalated
	s.setPID(0)
	if w, ok := cmd.Stdout.(*io.PipeWriter); ok {
		_ = w.Close()
	}
	return err
}

func (s *Server) forward(r io.Reader) {
	lines := bufio.NewReaderSize(r, maxLogLine)
	for {
		line, err := lines.ReadSlice('\n')
		if text := strings.TrimSpace(string(line)); text != "" {
			s.conf.Log.Info(text, "source", "postgresql")
		}
		if err != nil && err != bufio.ErrBufferFull { //nolint:errorlint // bufio returns it as it is
			return
		}
	}
}

func (s *Server) setPID(pid int) {
	s.mu.Lock()
	s.pid = pid
	s.mu.Unlock()
}
