//go:build failpoint

// Package failpoint marks the steps between which a program may be killed, so that a test can kill it at each of them.
// It owns the marks and their list; what must hold afterwards is the tests' business. Without the build tag failpoint a
// mark compiles to nothing, and no program that is shipped is built with it.
package failpoint

import (
	"fmt"
	"os"
	"sync"
	"syscall"
)

// Env names the file that arms one point: it holds the name and at which hit of it the program dies
// ("agent/accept/synced 1"). The file may come and change while the program runs. As the program dies, the file is
// renamed to end in ReachedSuffix: it is disarmed for the next start, and the test sees that the point was reached.
const (
	Env           = "GPUAAS_FAILPOINT"
	ReachedSuffix = ".reached"
)

// counter counts hits of the armed point.
type counter struct {
	mu    sync.Mutex
	armed string
	hits  int
}

var counted counter

// Hit ends the program with SIGKILL, as a power cut would, if the point is armed and this is the hit that was asked
// for.
func Hit(name string) {
	path := os.Getenv(Env)
	if path == "" {
		return
	}
	armed, err := os.ReadFile(path)
	if err != nil || !counted.due(string(armed), name) {
		return
	}
	if err := os.Rename(path, path+ReachedSuffix); err != nil {
		return // just disarmed
	}
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {} // the signal ends all threads; this one must not continue
}

func (c *counter) due(armed, name string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if armed != c.armed {
		c.armed, c.hits = armed, 0
	}
	var (
		wanted string
		hit    int
	)
	if _, err := fmt.Sscan(armed, &wanted, &hit); err != nil || wanted != name {
		return false
	}
	c.hits++
	return c.hits == hit
}
