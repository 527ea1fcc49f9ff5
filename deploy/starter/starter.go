// Package starter has what the reference controllers below it share: the machines of an instance's members, and steps
// on them by a shell. The controllers are external workers, on pkg/worker.
package starter

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/pkg/worker"
)

const (
	// readyLimit is how long the software of a member may take to be ready after its start.
	readyLimit = 3 * time.Minute
	pollEvery  = 500 * time.Millisecond
	// outputWait bounds the wait for the end of a step's output: daemons that it starts may hold it open.
	outputWait = 5 * time.Second
)

// Machine is a member's machine.
type Machine struct {
	// Address is where the other members reach it.
	Address string `yaml:"address"`
	// Shell is the command before "sh", like ssh root@10.0.0.5.
	Shell []string `yaml:"shell"`
	CPUs  int      `yaml:"cpus"`
}

// Machines gives the machine of an allocation.
type Machines func(allocationID string) (Machine, error)

// Node is a member with its machine. Name is its name in the cluster, which stays the same.
type Node struct {
	client.Member
	Machine
	Name string
	// Script has the steps as a shell script that is called with a verb, Name, Dir and arguments.
	Script []byte
	// Dir is where a member keeps the cluster's files.
	Dir string
}

// Nodes are the members that an instance has, but for those that were lost with their nodes, its controller first; it
// is an error to have none.
func (m Machines) Nodes(i client.AppInstance, script []byte, dir string) (nodes []Node, err error) {
	for _, member := range i.Members {
		if member.Status == client.MemberStatusRemoved || member.StatusReason == client.StatusReasonNodeLost {
			continue // its machine is no longer the instance's
		}
		machine, err := m(member.AllocationID)
		if err != nil {
			return nil, unreachable(err)
		}
		name := "n" + member.ID[len(member.ID)-12:]
		nodes = append(nodes, Node{Member: member, Machine: machine, Name: name, Script: script, Dir: dir})
	}
	slices.SortStableFunc(nodes, func(a, b Node) int { return strings.Compare(a.Role, b.Role) })
	if len(nodes) == 0 || nodes[0].Role != string(client.MemberRoleController) {
		return nil, errors.New("the instance has no controller")
	}
	return nodes, nil
}

// Step runs a verb of the script on the machine, as often as it is asked to; it returns what the verb says.
func (n Node) Step(ctx context.Context, verb string, args ...string) (string, error) {
	words := append(slices.Clone(n.Shell), "sh", "-s", "--", verb, n.Name, n.Dir)
	words = append(words, args...)
	cmd := exec.CommandContext(ctx, words[0], words[1:]...)
	cmd.WaitDelay = outputWait
	cmd.Stdin = bytes.NewReader(n.Script)
	var out, trouble bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &trouble
	err := cmd.Run()
	if err != nil && !errors.Is(err, exec.ErrWaitDelay) {
		return "", unreachable(fmt.Errorf("%s on %s: %w: %s", verb, n.Address, err, strings.TrimSpace(trouble.String())))
	}
	return strings.TrimSpace(out.String()), nil
}

// Each runs a verb on all nodes, one after the other.
func Each(ctx context.Context, nodes []Node, verb string, args ...string) error {
	for _, n := range nodes {
		if _, err := n.Step(ctx, verb, args...); err != nil {
			return err
		}
	}
	return nil
}

// Await waits until a verb on the node says one of the words.
func (n Node) Await(ctx context.Context, words []string, verb string, args ...string) error {
	for {
		said, err := n.Step(ctx, verb, args...)
		if err == nil && slices.Contains(words, said) {
			return nil
		}
		select {
		case <-ctx.Done():
			return &worker.Failure{
				Reason: client.WorkerReasonReadinessTimeout,
				Cause:  fmt.Errorf("%s %v is %q: %w", verb, args, said, errors.Join(err, context.Cause(ctx))),
			}
		case <-time.After(pollEvery):
		}
	}
}

// AwaitReady is Await for what has been started; it does not wait for ever.
func (n Node) AwaitReady(ctx context.Context, words []string, verb string, args ...string) error {
	ctx, cancel := context.WithTimeout(ctx, readyLimit)
	defer cancel()
	return n.Await(ctx, words, verb, args...)
}

func unreachable(err error) error {
	return &worker.Failure{Reason: client.WorkerReasonNodeUnreachable, Cause: err}
}
