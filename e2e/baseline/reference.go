package baseline

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/containerd/v2/pkg/namespaces"
)

// Reference are the times of one launch by plain calls of containerd's client beside the product's own network, in the
// product's order: the container's record and snapshot while its network is made, its task once the namespaces exist,
// its start once the network is complete. Launch and Removal are whole; the parts overlap.
type Reference struct {
	Launch, Removal                           time.Duration
	NewContainer, Network, NewTask, Start     time.Duration
	Kill, DeleteTask, DeleteContainer, Detach time.Duration
}

// Attacher is the program that makes the product's networks (agent/internal/network/attach).
type Attacher struct {
	cmd     *exec.Cmd
	in      io.WriteCloser
	replies *json.Decoder
}

type attachRequest struct {
	ID            string `json:"id"`
	HostPort      uint16 `json:"host_port,omitempty"`
	ContainerPort uint16 `json:"container_port,omitempty"`
	Remove        bool   `json:"remove,omitempty"`
}

type attachReply struct {
	Step       string `json:"step"`
	NetNSPath  string `json:"net_ns_path"`
	UserNSPath string `json:"user_ns_path"`
	Error      string `json:"error"`
}

// StartAttacher starts the program with a bridge, addresses and a state directory of its own, and the user ids of the
// measured container.
func (b *Bench) StartAttacher(program, bridge, cidr, stateDir string) (*Attacher, error) {
	args := []string{"-bridge", bridge, "-cidr", cidr, "-state-dir", stateDir}
	if maps := b.spec.Linux.UIDMappings; len(maps) == 1 {
		args = append(args, "-uid-base", strconv.Itoa(int(maps[0].HostID)), "-uid-size", strconv.Itoa(int(maps[0].Size)))
	}
	cmd := exec.Command(program, args...)
	cmd.Stderr = os.Stderr
	in, err1 := cmd.StdinPipe()
	out, err2 := cmd.StdoutPipe()
	if err := errors.Join(err1, err2); err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	a := &Attacher{cmd: cmd, in: in, replies: json.NewDecoder(out)}
	if err := b.holdBridge(a); err != nil {
		return nil, errors.Join(err, a.Close())
	}
	return a, nil
}

// holdBridge makes a network that stays: without one, each launch would make the bridge and each removal remove it. On
// the node, the measured container is there all the time.
func (b *Bench) holdBridge(a *Attacher) error {
	port, err := freePort()
	if err != nil {
		return err
	}
	if err := a.ask(attachRequest{
		ID: "holder", HostPort: uint16(port), ContainerPort: uint16(b.conf.ContainerPort),
	}); err != nil {
		return err
	}
	for _, step := range []string{"paths", "namespaces", "done"} {
		if _, err := a.await(step); err != nil {
			return err
		}
	}
	return nil
}

// Close removes the bridge and ends the program.
func (a *Attacher) Close() error { return errors.Join(a.in.Close(), a.cmd.Wait()) }

func (a *Attacher) ask(r attachRequest) error { return json.NewEncoder(a.in).Encode(r) }

// await reads the reply of a step.
func (a *Attacher) await(step string) (r attachReply, err error) {
	if err := a.replies.Decode(&r); err != nil {
		return r, fmt.Errorf("network: %w", err)
	}
	if r.Error != "" {
		return r, fmt.Errorf("network: %s", r.Error)
	}
	if r.Step != step {
		return r, fmt.Errorf("network: %s instead of %s", r.Step, step)
	}
	return r, nil
}

// MeasureReference launches the container once and removes it again.
func (b *Bench) MeasureReference(ctx context.Context, a *Attacher) (p Reference, err error) {
	ctx = namespaces.WithNamespace(ctx, namespace)
	b.round++
	id := fmt.Sprintf("reference-%d-%d", os.Getpid(), b.round)
	port, err := freePort()
	if err != nil {
		return p, err
	}
	container, task, err := b.launchReference(ctx, a, id, uint16(port), &p)
	if err == nil {
		err = timed(&p.Removal, func() error { return removeReference(ctx, a, id, container, task, &p) })
		return p, err
	}
	if task != nil {
		err = errors.Join(err, deleted(task.Delete(ctx, client.WithProcessKill)))
	}
	if container != nil {
		err = errors.Join(err, container.Delete(ctx, client.WithSnapshotCleanup))
	}
	return p, err
}

// launchReference returns what it has made, also with an error.
func (b *Bench) launchReference(ctx context.Context, a *Attacher, id string, port uint16, p *Reference,
) (container client.Container, task client.Task, err error) {
	start := time.Now()
	if err := a.ask(attachRequest{ID: id, HostPort: port, ContainerPort: uint16(b.conf.ContainerPort)}); err != nil {
		return nil, nil, err
	}
	paths, err := a.await("paths")
	if err != nil {
		return nil, nil, err
	}
	// The network's steps arrive while the container's record is made.
	exist, complete := make(chan error, 1), make(chan error, 1)
	go func() {
		_, err := a.await("namespaces")
		exist <- err
		if err == nil {
			_, err = a.await("done")
		}
		p.Network = time.Since(start)
		complete <- err
	}()
	err = timed(&p.NewContainer, func() (err error) {
		container, err = b.newContainer(ctx, id, pinned{net: paths.NetNSPath, user: paths.UserNSPath})
		return err
	})
	if err := errors.Join(err, <-exist); err != nil {
		return container, nil, errors.Join(err, <-complete)
	}
	err = timed(&p.NewTask, func() (err error) {
		task, err = container.NewTask(ctx, cio.NullIO)
		return err
	})
	if err := errors.Join(err, <-complete); err != nil {
		return container, task, err
	}
	err = timed(&p.Start, func() error { return task.Start(ctx) })
	p.Launch = time.Since(start)
	return container, task, err
}

// removeReference removes the container, then its network, as the product does; the process is killed with SIGKILL.
func removeReference(ctx context.Context, a *Attacher, id string, container client.Container, task client.Task,
	p *Reference,
) error {
	ended, err := task.Wait(ctx)
	if err == nil {
		err = timed(&p.Kill, func() error {
			err := task.Kill(ctx, syscall.SIGKILL)
			if err == nil {
				<-ended
			}
			return err
		})
	}
	return errors.Join(err,
		timed(&p.DeleteTask, func() error { return deleted(task.Delete(ctx, client.WithProcessKill)) }),
		timed(&p.DeleteContainer, func() error { return container.Delete(ctx, client.WithSnapshotCleanup) }),
		timed(&p.Detach, func() error {
			if err := a.ask(attachRequest{ID: id, Remove: true}); err != nil {
				return err
			}
			_, err := a.await("done")
			return err
		}))
}
