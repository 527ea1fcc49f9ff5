// Command service stands in for the images that the Compose files of pkg/compose/testdata name: a server on the ports
// that they use, and the programs that they run. It does under each of its names what that program would do there.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// patience bounds how long a service that runs once waits for another.
const patience = 20 * time.Second

func main() {
	if err := run(filepath.Base(os.Args[0]), os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(name string, args []string) error {
	if len(args) > 1 && args[0] == "/app" {
		args = args[1:] // the files name the program, the image's entry point is the program
	}
	switch {
	case name == "tini" && len(args) > 1 && args[0] == "--":
		path, err := exec.LookPath(args[1])
		if err != nil {
			return err
		}
		return syscall.Exec(path, args[1:], os.Environ())
	case name == "sh" && len(args) == 2 && args[0] == "-c":
		return shell(args[1])
	case name == "pg_isready":
		return answers("http://localhost:5432/")
	case len(args) == 1 && (args[0] == "health" || args[0] == "ping"):
		return answers("http://localhost:8000/")
	case len(args) == 1 && args[0] == "migrate":
		for end := time.Now().Add(patience); ; time.Sleep(100 * time.Millisecond) {
			if err := answers("http://db:8000/"); err == nil || time.Now().After(end) {
				return err
			}
		}
	case len(args) == 1 && args[0] == "fetch":
		if _, err := os.Stat("/models"); err != nil {
			return nil //nolint:nilerr // this file mounts no volume there
		}
		return os.WriteFile("/models/weights", []byte("weights"), 0o600)
	case len(args) == 2 && args[0] == "get":
		return answers(args[1])
	}
	return serve()
}

// shell runs the one command line that the files have: curl -fsS URL || exit 1.
func shell(line string) error {
	words := strings.Fields(line)
	if len(words) != 6 || words[0] != "curl" || strings.Join(words[3:], " ") != "|| exit 1" {
		return fmt.Errorf("this is no shell: %s", line)
	}
	return answers(words[2])
}

func answers(url string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	_, err = io.Copy(os.Stdout, resp.Body)
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	return err
}

// serve answers with the container's host name on every port that a file has, until its end is requested.
func serve() error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	hostname, err := os.Hostname()
	if err != nil {
		return err
	}
	server := &http.Server{ReadHeaderTimeout: 5 * time.Second, Handler: http.HandlerFunc(
		func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprintln(w, hostname) })}
	for _, port := range []int{80, 5000, 5432, 6000, 7000, 7001, 7002, 8000, 8080, 9001} {
		listener, err := new(net.ListenConfig).Listen(ctx, "tcp", fmt.Sprint(":", port))
		if err != nil && port < 1024 {
			continue // its user may not
		}
		if err != nil {
			return err
		}
		go func() { _ = server.Serve(listener) }()
	}
	<-ctx.Done()
	return server.Close()
}
