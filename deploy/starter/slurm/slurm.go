// Package slurm is the reference of an external worker: it operates a Slurm cluster of Debian's packages, whose
// controller runs on the member of that role, and slurmd on every member. It keeps nothing itself: another process may
// go on where one died.
package slurm

import (
	"context"
	_ "embed" // the steps on a member
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/gpuaas/gpuaas/deploy/starter"
	"github.com/gpuaas/gpuaas/pkg/client"
	"github.com/gpuaas/gpuaas/pkg/worker"
)

//go:embed member.sh
var memberScript []byte

// Manifest is the app that Controller operates.
//
//go:embed manifest.yaml
var Manifest []byte

// Dir is where a member keeps the cluster's files.
const Dir = "/srv/slurm"

// Controller operates one cluster.
type Controller struct {
	Machines starter.Machines
}

// working are the states of a node that takes jobs.
func working() []string { return []string{"idle", "mixed", "allocated", "completing"} }

// Handle does one task; it is the handler of a worker.
func (c *Controller) Handle(ctx context.Context, t worker.Task) error {
	nodes, err := c.Machines.Nodes(t.Instance, memberScript, Dir)
	if err != nil {
		return err
	}
	about := slices.IndexFunc(nodes, func(n starter.Node) bool { return n.ID == t.MemberID })
	switch t.Kind {
	case client.TaskKindDeploy, client.TaskKindMemberAdd:
		return form(ctx, t, nodes)
	case client.TaskKindMemberRemove:
		return remove(ctx, t, nodes, about)
	case client.TaskKindMemberRecover:
		return restart(ctx, t, nodes, about)
	case client.TaskKindDecommission:
		if err := t.Phase(ctx, "remove"); err != nil {
			return err
		}
		slices.Reverse(nodes) // the controller goes last
		return starter.Each(ctx, nodes, "remove")
	default:
		return fmt.Errorf("the task %s is not in the manifest", t.Kind)
	}
}

const (
	// answerLimit bounds the wait for a machine, which may hang, so that there is time left for the others.
	answerLimit = 5 * time.Second
	// maxAsked bounds the machines that are asked at once.
	maxAsked = 32
)

// Members says how the nodes of the cluster do; it is the Members of a worker. A machine that does not answer is one
// failed member, not an error.
func (c *Controller) Members(ctx context.Context, i client.AppInstance) (map[string]client.MemberReport, error) {
	nodes, err := c.Machines.Nodes(i, memberScript, Dir)
	if err != nil {
		return nil, err
	}
	alive := whichAnswer(ctx, nodes)
	reports := map[string]client.MemberReport{}
	for at, n := range nodes {
		state, err := nodes[0].Step(ctx, "state", n.Name)
		if err != nil {
			return nil, err
		}
		switch {
		case !alive[at]:
			reports[n.ID] = client.MemberReport{
				Status: client.MemberReportStatusFailed, Reason: client.WorkerReasonNodeUnreachable,
			}
		case slices.Contains(working(), state):
			reports[n.ID] = client.MemberReport{Status: client.MemberReportStatusReady}
		default:
			reports[n.ID] = client.MemberReport{
				Status: client.MemberReportStatusDegraded, Reason: client.WorkerReasonInternal, Detail: "sinfo: " + state,
			}
		}
	}
	return reports, nil
}

// whichAnswer asks all machines whether they serve.
func whichAnswer(ctx context.Context, nodes []starter.Node) []bool {
	alive := make([]bool, len(nodes))
	var group errgroup.Group
	group.SetLimit(maxAsked)
	for at, n := range nodes {
		group.Go(func() error {
			ctx, cancel := context.WithTimeout(ctx, answerLimit)
			defer cancel()
			said, err := n.Step(ctx, "alive")
			alive[at] = err == nil && said == "yes"
			return nil
		})
	}
	_ = group.Wait() // none fails
	return alive
}

// form makes a cluster of all nodes, or adds one to it: Slurm reads its nodes when its daemons start. Jobs go on.
func form(ctx context.Context, t worker.Task, nodes []starter.Node) error {
	if err := t.Phase(ctx, "install"); err != nil {
		return err
	}
	if err := starter.Each(ctx, nodes, "install"); err != nil {
		return &worker.Failure{Reason: client.WorkerReasonEnvironmentFailed, Cause: err}
	}
	if err := t.Phase(ctx, "configure"); err != nil {
		return err
	}
	if err := configure(ctx, nodes); err != nil {
		return err
	}
	if err := t.Phase(ctx, "start"); err != nil {
		return err
	}
	if err := start(ctx, nodes); err != nil {
		return err
	}
	for _, n := range nodes {
		if err := nodes[0].AwaitReady(ctx, working(), "state", n.Name); err != nil {
			return err
		}
	}
	return nil
}

// remove drains a node, which waits for its jobs, stops it and forms the cluster of the others.
func remove(ctx context.Context, t worker.Task, nodes []starter.Node, about int) error {
	if about <= 0 {
		return errors.New("the task names no worker of the cluster")
	}
	controller, leaving, rest := nodes[0], nodes[about], slices.Delete(slices.Clone(nodes), about, about+1)
	if err := t.Phase(ctx, "drain"); err != nil {
		return err
	}
	// A node that the controller does not know was removed by an attempt before this one, or never joined.
	known, err := controller.Step(ctx, "state", leaving.Name)
	if err != nil {
		return err
	}
	if known != "" {
		if _, err := controller.Step(ctx, "drain", leaving.Name); err != nil {
			return err
		}
		drained := []string{"drained", "drained*", "down", "down*"}
		if err := controller.Await(ctx, drained, "state", leaving.Name); err != nil {
			return err
		}
	}
	if err := t.Phase(ctx, "leave"); err != nil {
		return err
	}
	if _, err := leaving.Step(ctx, "remove"); err != nil {
		return err
	}
	if err := configure(ctx, rest); err != nil {
		return err
	}
	return start(ctx, rest)
}

// restart starts the daemons of a node again, and lets Slurm use it.
func restart(ctx context.Context, t worker.Task, nodes []starter.Node, about int) error {
	if about < 0 {
		return errors.New("the task names no member of the cluster")
	}
	if err := t.Phase(ctx, "start"); err != nil {
		return err
	}
	if err := start(ctx, nodes[about:about+1]); err != nil {
		return err
	}
	if _, err := nodes[0].Step(ctx, "resume", nodes[about].Name); err != nil {
		return err
	}
	return nodes[0].AwaitReady(ctx, working(), "state", nodes[about].Name)
}

// configure gives all nodes the same configuration and key.
func configure(ctx context.Context, nodes []starter.Node) error {
	host, err := nodes[0].Step(ctx, "hostname")
	if err != nil {
		return err
	}
	key, err := nodes[0].Step(ctx, "key")
	if err != nil {
		return err
	}
	text := base64.StdEncoding.EncodeToString([]byte(configuration(host, nodes)))
	return starter.Each(ctx, nodes, "configure", text, key)
}

// start starts the daemons of nodes, or starts them again.
func start(ctx context.Context, nodes []starter.Node) error {
	for _, n := range nodes {
		if _, err := n.Step(ctx, "start", n.Role); err != nil {
			return err
		}
	}
	return nil
}

// configuration is slurm.conf.
func configuration(host string, nodes []starter.Node) string {
	var b strings.Builder
	fmt.Fprintf(&b, `ClusterName=gpuaas
SlurmctldHost=%[1]s(%[2]s)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=%[3]s/munge.socket
CredType=cred/munge
StateSaveLocation=%[3]s/ctld
SlurmdSpoolDir=%[3]s/%%n
SlurmctldPidFile=%[3]s/slurmctld.pid
SlurmdPidFile=%[3]s/slurmd.pid
SlurmctldLogFile=%[3]s/slurmctld.log
SlurmdLogFile=%[3]s/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
PropagateResourceLimits=NONE
`, host, nodes[0].Address, Dir)
	for _, n := range nodes {
		fmt.Fprintf(&b, "NodeName=%s NodeAddr=%s CPUs=%d\n", n.Name, n.Address, n.CPUs)
	}
	b.WriteString("PartitionName=main Nodes=ALL Default=YES State=UP\n")
	return b.String()
}
