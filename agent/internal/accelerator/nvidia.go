package accelerator

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/gpuaas/gpuaas/agent/internal/cdi"
	"github.com/gpuaas/gpuaas/protocol"
)

const (
	// maxAnswerBytes bounds what gpuaas-nvml may print, maxErrorBytes what of its errors is kept.
	maxAnswerBytes = 1 << 20
	maxErrorBytes  = 4 << 10
	// killWait is how long a killed child may take to end.
	killWait = time.Second
)

// nvidia asks NVIDIA's driver by the program gpuaas-nvml, a new process for each question. Between two questions no
// process has the driver open: an admin can reset a GPU, change MIG or replace the driver.
type nvidia struct {
	machine machine
	program string
	timeout time.Duration
	// answers is set while a child runs. A child that hangs in the kernel outlives its kill; it keeps the place, so that
	// there is never a second one.
	answers chan answer
}

type answer struct {
	found []*protocol.Accelerator
	err   error
}

// scan asks the driver. A machine without the driver has no NVIDIA accelerators.
func (n *nvidia) scan(ctx context.Context) ([]*protocol.Accelerator, error) {
	if _, err := os.Stat(n.machine.path("sys/module/nvidia")); err != nil {
		return nil, nil
	}
	if n.answers == nil {
		n.answers = make(chan answer, 1)
		go func(to chan<- answer) {
			found, err := n.ask(ctx)
			to <- answer{found, err}
		}(n.answers)
	}
	limit := time.NewTimer(n.timeout + 2*killWait)
	defer limit.Stop()
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-limit.C:
		return nil, fmt.Errorf("%s hangs and cannot be killed", n.program)
	case a := <-n.answers:
		n.answers = nil
		return a.found, a.err
	}
}

// ask runs the program, and kills it when it does not answer in time.
func (n *nvidia) ask(ctx context.Context) ([]*protocol.Accelerator, error) {
	ctx, cancel := context.WithTimeout(ctx, n.timeout)
	defer cancel()
	out, errs := bounded{left: maxAnswerBytes}, bounded{left: maxErrorBytes}
	cmd := exec.CommandContext(ctx, n.program)
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = &out, &errs, killWait
	if err := cmd.Run(); ctx.Err() != nil {
		return nil, fmt.Errorf("%s has not answered within %s", n.program, n.timeout)
	} else if err != nil {
		return nil, fmt.Errorf("%s: %w: %s", n.program, err, bytes.TrimSpace(errs.content))
	}
	facts := &protocol.NodeFacts{}
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(out.content, facts); err != nil {
		return nil, fmt.Errorf("%s: %w", n.program, err)
	}
	for _, a := range facts.GetAccelerators() {
		a.NumaNode = n.machine.numaNode(a.GetPciAddress())
	}
	return facts.GetAccelerators(), nil
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

// edits refuses: the driver's files and nodes are not known yet.
func (n *nvidia) edits(context.Context, []grant) (cdi.Edits, error) {
	return cdi.Edits{}, errors.New("NVIDIA's accelerators cannot be given to containers yet")
}
