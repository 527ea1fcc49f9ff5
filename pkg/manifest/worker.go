package manifest

import (
	"fmt"
	"slices"
)

// FeatureExternalWorker is an app whose controller runs outside the platform and works off tasks. No node gets such a
// workload; hubs that lack the feature refuse the manifest.
const FeatureExternalWorker = "external_worker"

// The runtime backends that an external worker operates.
const (
	RuntimeBareMetal = "bare_metal"
	RuntimeSlurm     = "slurm"
	RuntimeRay       = "ray"
	RuntimeK8s       = "k8s"
)

// IsExternal reports whether an external worker operates apps of a runtime backend, instead of the agents of nodes.
func IsExternal(backend string) bool {
	return slices.Contains([]string{RuntimeBareMetal, RuntimeSlurm, RuntimeRay, RuntimeK8s}, backend)
}

// The kinds of tasks that an external worker may get.
const (
	TaskDeploy        = "deploy"
	TaskUpgrade       = "upgrade"
	TaskRollback      = "rollback"
	TaskStop          = "stop"
	TaskStart         = "start"
	TaskDecommission  = "decommission"
	TaskMemberAdd     = "member_add"
	TaskMemberRemove  = "member_remove"
	TaskMemberRecover = "member_recover"
)

// WorkerContract is what hub and external worker agree on.
type WorkerContract struct {
	// Delivery is polling: the worker asks for tasks.
	Delivery string `json:"delivery"`
	// Components are the roles of members, in the order in which a new instance fills them.
	Components []Component `json:"components"`
	Tasks      []TaskKind  `json:"tasks"`
}

// Component is one role of members, and how many of them an instance has.
type Component struct {
	// Role is controller, worker, head or node.
	Role string `json:"role"`
	Min  int    `json:"min"`
	Max  int    `json:"max"`
}

// TaskKind is one kind of task, with the phases that the worker reports in this order.
type TaskKind struct {
	Kind   string   `json:"kind"`
	Phases []string `json:"phases"`
}

// Task returns the kind of task; nil where the worker knows none. A worker without start deploys again.
func (c WorkerContract) Task(kind string) *TaskKind {
	for _, name := range []string{kind, map[string]string{TaskStart: TaskDeploy}[kind]} {
		if i := slices.IndexFunc(c.Tasks, func(t TaskKind) bool { return t.Kind == name }); i >= 0 {
			return &c.Tasks[i]
		}
	}
	return nil
}

// Roles gives the roles of so many members of a new instance: the least number of each component, and the rest to the
// later ones first. It is nil where the contract does not allow that number.
func (c WorkerContract) Roles(members int) []string {
	counts := make([]int, len(c.Components))
	for i, component := range c.Components {
		counts[i] = component.Min
		members -= component.Min
	}
	for i := len(counts) - 1; i >= 0 && members > 0; i-- {
		more := min(members, c.Components[i].Max-counts[i])
		counts[i] += more
		members -= more
	}
	if members != 0 {
		return nil
	}
	var roles []string
	for i, component := range c.Components {
		roles = append(roles, slices.Repeat([]string{component.Role}, counts[i])...)
	}
	return roles
}

// Component returns the component of a role; nil where there is none.
func (c WorkerContract) Component(role string) *Component {
	if i := slices.IndexFunc(c.Components, func(o Component) bool { return o.Role == role }); i >= 0 {
		return &c.Components[i]
	}
	return nil
}

// checkContract makes sure that the apps of an external worker, and only these, have a contract that can be kept.
func (m Manifest) checkContract(f *findings) {
	const at = "/version/external_worker_contract"
	c := m.Version.ExternalWorkerContract
	if IsExternal(m.App.RuntimeBackend) != (c != nil) {
		f.add(at, "belongs to the runtime backends bare_metal, slurm, ray and k8s, which need it")
	}
	if c == nil {
		return
	}
	seen, members := map[string]bool{}, 0
	for i, component := range c.Components {
		at := fmt.Sprintf("%s/components/%d", at, i)
		if seen[component.Role] {
			f.add(at+"/role", "stands twice")
		}
		seen[component.Role] = true
		if component.Min > component.Max {
			f.add(at+"/min", "is more than max")
		}
		members += component.Min
	}
	if members == 0 {
		f.add(at+"/components", "must have at least one member in all")
	}
	kinds := map[string]bool{}
	for i, t := range c.Tasks {
		if kinds[t.Kind] {
			f.add(fmt.Sprintf("%s/tasks/%d/kind", at, i), "stands twice")
		}
		kinds[t.Kind] = true
	}
	for _, kind := range []string{TaskDeploy, TaskDecommission} {
		if !kinds[kind] {
			f.add(at+"/tasks", "must have the kind "+kind)
		}
	}
	for name, s := range m.parameterSchemas() {
		if s["writeOnly"] == true {
			f.add("/version/parameters/properties/"+escapePointer(name), "is secret, and an external worker has no node to "+
				"seal it to")
		}
	}
}
