package accelerator

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/gpuaas/gpuaas/agent/internal/cdi"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	// maxAnswerBytes bounds what gpuaas-nvml may print, maxErrorBytes what of its errors is kept.
	maxAnswerBytes = 1 << 20
	maxErrorBytes  = 4 << 10
	// maxLineBytes bounds the line of a test program that becomes part of an accelerator's health.
	maxLineBytes = 200
	// killWait is how long a killed child may take to end.
	killWait = time.Second
)

// nvidia asks NVIDIA's driver by the program gpuaas-nvml, a new process for each question. Between two questions no
// process has the driver open: an admin can reset a GPU, change MIG or replace the driver. Nothing is kept of what a
// container needs, either: it is right for the driver as it is when the container starts.
type nvidia struct {
	machine machine
	program string
	// root is where the driver's files lie.
	root    string
	timeout time.Duration
	// place is taken while a child runs. A child that hangs in the kernel outlives its kill and keeps it, so that there
	// is never a second one.
	place chan struct{}
	// resetProgram is the path of nvidia-smi.
	resetProgram string
}

// scan asks for the machine's accelerators. A machine without the driver has no NVIDIA accelerators.
func (n *nvidia) scan(ctx context.Context) ([]*protocol.Accelerator, error) {
	if _, err := os.Stat(n.machine.path("sys/module/nvidia")); err != nil {
		return nil, nil //nolint:nilerr // the module is not loaded
	}
	out, err := n.ask(ctx)
	if err != nil {
		return nil, err
	}
	facts := &protocol.NodeFacts{}
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(out, facts); err != nil {
		return nil, fmt.Errorf("%s: %w", n.program, err)
	}
	for _, a := range facts.GetAccelerators() {
		a.NumaNode = n.machine.numaNode(a.GetPciAddress())
	}
	return facts.GetAccelerators(), nil
}

// edits asks what a container needs. A GPU in MIG mode cannot compute as a whole, and a shared one is given by slices:
// one to a container, which would gain nothing from a second.
func (n *nvidia) edits(ctx context.Context, granted []grant) (cdi.Edits, error) {
	args, ids := []string{"cdi"}, []string{}
	for _, g := range granted {
		if g.partition == "" && len(g.accelerator.GetPartitions()) > 0 {
			return cdi.Edits{}, fmt.Errorf("%s is partitioned (MIG) or shared: only its parts can be given", g.id())
		}
		if g.sharing != "" && len(granted) > 1 {
			return cdi.Edits{}, fmt.Errorf("%s is a slice: a container has one, and no other accelerator", g.id())
		}
		ids = append(ids, g.device())
	}
	out, err := n.ask(ctx, append(args, ids...)...)
	if err != nil {
		return cdi.Edits{}, err
	}
	spec := &specs.Spec{}
	if err := json.Unmarshal(out, spec); err != nil {
		return cdi.Edits{}, fmt.Errorf("%s: %w", n.program, err)
	}
	return cdi.FromSpec(spec, ids, n.root)
}

// resetTimeout bounds one reset of a GPU.
const resetTimeout = 2 * time.Minute

// reset resets a GPU; the driver refuses that while a process uses it. Its program inherits the files.
func (n *nvidia) reset(ctx context.Context, address string, inherit []*os.File) error {
	if _, err := os.Stat(n.resetProgram); err != nil {
		return errNoReset
	}
	select {
	case n.place <- struct{}{}: // no question of the agent's has the driver open
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-n.place }()
	ctx, cancel := context.WithTimeout(ctx, resetTimeout)
	defer cancel()
	out := bounded{left: maxErrorBytes}
	cmd := exec.CommandContext(ctx, n.resetProgram, "--gpu-reset", "--id="+address)
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay, cmd.ExtraFiles = &out, &out, killWait, inherit
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s: %w: %s", n.resetProgram, err, bytes.TrimSpace(out.content))
	}
	return nil
}

// ask runs the program as soon as no other of it runs, and returns what it prints.
func (n *nvidia) ask(ctx context.Context, args ...string) ([]byte, error) {
	limit := time.NewTimer(n.timeout + 2*killWait)
	defer limit.Stop()
	type answer struct {
		out []byte
		err error
	}
	answers := make(chan answer, 1)
	select {
	case n.place <- struct{}{}:
		go func() {
			defer func() { <-n.place }()
			out, err := n.run(ctx, args)
			answers <- answer{out, err}
		}()
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-limit.C:
		return nil, fmt.Errorf("%s hangs and cannot be killed", n.program)
	}
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-limit.C:
		return nil, fmt.Errorf("%s hangs and cannot be killed", n.program)
	case a := <-answers:
		return a.out, a.err
	}
}

// run runs the program, and kills it when it does not answer in time.
func (n *nvidia) run(ctx context.Context, args []string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, n.timeout)
	defer cancel()
	out, errs := bounded{left: maxAnswerBytes}, bounded{left: maxErrorBytes}
	cmd := exec.CommandContext(ctx, n.program, append([]string{"--driver-root", n.root}, args...)...)
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &out, &errs, killWait
	if err := cmd.Run(); ctx.Err() != nil {
		return nil, fmt.Errorf("%s has not answered within %s", n.program, n.timeout)
	} else if err != nil {
		return nil, fmt.Errorf("%s: %w: %s", n.program, err, bytes.TrimSpace(errs.content))
	}
	return out.content, nil
}

// lastLine keeps the end of what a program prints.
type lastLine struct{ content []byte }

func (l *lastLine) Write(p []byte) (int, error) {
	l.content = append(l.content, p...)
	if over := len(l.content) - maxLineBytes; over > 0 {
		l.content = slices.Delete(l.content, 0, over)
	}
	return len(p), nil
}

func (l *lastLine) text() string {
	line := bytes.TrimSpace(l.content)
	return strings.ToValidUTF8(string(line[bytes.LastIndexByte(line, '\n')+1:]), "?")
}

// bounded is a buffer that fails when it is full. It embeds no bytes.Buffer, whose ReadFrom knows no bound.
type bounded struct {
	content []byte
	left    int
}

func (b *bounded) Write(p []byte) (int, error) {
	if len(p) > b.left {
		return 0, errors.New("the output is too long")
	}
	b.left -= len(p)
	b.content = append(b.content, p...)
	return len(p), nil
}
