// Package policy holds the owner's rules about what runs on the machine. They are in a local file, and no hub overrules
// them. It decides; agent/internal/local reads the file, and agent/internal/reconcile stops what is refused. It is
// pure.
package policy

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// Limits of a policy file.
const (
	MaxBytes = 64 << 10
	maxNames = 1000
)

// Policy is what the owner allows. The zero value allows everything that is signed and leased.
type Policy struct {
	// Closed refuses every workload: the owner wants the machine back.
	Closed bool `yaml:"closed"`
	// Orgs are slugs of tenants, Apps slugs of apps.
	Orgs Names `yaml:"orgs"`
	Apps Names `yaml:"apps"`
	// Largest bounds one workload, all of its services together.
	Largest Size `yaml:"largest_workload"`
	// Egress bounds what members reach outside the machine.
	Egress Egress `yaml:"egress"`
	// HostPorts are the ports of the machine that tenants may choose; the zero value is none. The agent gives them to
	// nobody else.
	HostPorts PortRange `yaml:"host_ports"`
	// SSHUsers are the accounts of the machine that tenants may log in to; nobody may log in to any other.
	SSHUsers []string `yaml:"ssh_users"`
	// ShareWeakIsolation lets workloads of several orgs run side by side although the machine isolates containers weakly.
	ShareWeakIsolation bool `yaml:"share_weak_isolation"`

	// onlyOrg is the slug of the one org that may use the machine, because of weakness; both are empty where isolation is
	// strong.
	onlyOrg, weakness string
}

// Names allows the names in Only, or all if Only is empty, except those in Never.
type Names struct {
	Only  []string `yaml:"only"`
	Never []string `yaml:"never"`
}

// Size is a bound on one workload; zero is none.
type Size struct {
	// CPUMillis are thousandths of a core.
	CPUMillis uint64 `yaml:"cpu_millis"`
	// MemoryMB are millions of bytes.
	MemoryMB uint64 `yaml:"memory_mb"`
	// Accelerators is how many a workload may use. Zero is no bound: Apps says who may use none.
	Accelerators uint64 `yaml:"accelerators"`
}

// slugForm is the form of the slugs of orgs and apps: a name in another form matches none of them.
var slugForm = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]*[a-z0-9])?$`)

// Parse reads a policy file (YAML). A key that is not known is an error: a rule with a typing error in it would not
// hold.
func Parse(doc []byte) (Policy, error) {
	if len(doc) > MaxBytes {
		return Policy{}, malformed(fmt.Sprintf("has %d bytes; the limit is %d", len(doc), MaxBytes), nil)
	}
	dec := yaml.NewDecoder(bytes.NewReader(doc))
	dec.KnownFields(true)
	var p Policy
	if err := dec.Decode(&p); err != nil && !errors.Is(err, io.EOF) {
		return Policy{}, malformed("cannot be read: "+err.Error(), err)
	}
	if err := dec.Decode(new(Policy)); !errors.Is(err, io.EOF) {
		return Policy{}, malformed("must be one document", err)
	}
	for key, names := range map[string][]string{
		"orgs.only": p.Orgs.Only, "orgs.never": p.Orgs.Never, "apps.only": p.Apps.Only, "apps.never": p.Apps.Never,
		"ssh_users": p.SSHUsers,
	} {
		if len(names) > maxNames || slices.Contains(names, "") {
			return Policy{}, malformed(fmt.Sprintf("%s must list at most %d names, none of them empty", key, maxNames), nil)
		}
		for _, name := range names {
			if key != "ssh_users" && !slugForm.MatchString(name) {
				return Policy{}, malformed(fmt.Sprintf("%s has %q, which is no slug (lower-case letters, digits and hyphens)",
					key, name), nil)
			}
		}
	}
	return p, nil
}

func malformed(reason string, err error) error {
	return fault.New(fault.Malformed, codePolicyInvalid, "The owner's policy "+reason+".", err).Permanent()
}

// ForOneOrg returns the policy, with the rule that only this org may use the machine if its isolation is weak and the
// owner does not share it all the same. weak names what the machine lacks.
func (p Policy) ForOneOrg(orgSlug string, weak []string) Policy {
	if len(weak) > 0 && !p.ShareWeakIsolation {
		p.onlyOrg, p.weakness = orgSlug, strings.Join(weak, ", ")
	}
	return p
}

// Refuses gives the rule that keeps the workload off this machine, for its tenant to read; empty where none does.
func (p Policy) Refuses(w *protocol.Workload) string {
	if p.Closed {
		return "The owner of this node accepts no workloads at present."
	}
	if !p.Orgs.allow(w.GetOrgSlug()) {
		return "The owner of this node does not accept workloads of this organization."
	}
	if p.weakness != "" && w.GetOrgSlug() != p.onlyOrg {
		return "This node isolates containers weakly (" + p.weakness + ") and is in use by another organization."
	}
	if !p.Apps.allow(w.GetAppSlug()) {
		return "The owner of this node does not accept this app."
	}
	if rule := p.HostPorts.refuses(w); rule != "" {
		return rule
	}
	return p.Largest.refuses(w)
}

// AdmitsLogin reports whether an org may log in to an account of this machine.
func (p Policy) AdmitsLogin(user, orgSlug string) bool {
	return !p.Closed && slices.Contains(p.SSHUsers, user) && p.Orgs.allow(orgSlug)
}

func (n Names) allow(name string) bool {
	return !slices.Contains(n.Never, name) && (len(n.Only) == 0 || slices.Contains(n.Only, name))
}

func (s Size) refuses(w *protocol.Workload) string {
	const bytesPerMB = 1_000_000
	var cpu, memory, accelerators uint64
	for _, service := range w.GetServices() {
		r := service.GetResources()
		cpu += uint64(r.GetCpuMillis())
		memory += r.GetMemoryBytes()
		accelerators += uint64(len(r.GetAcceleratorIds()))
	}
	for _, bound := range []struct {
		what      string
		asks, max uint64
	}{
		{"thousandths of a core", cpu, s.CPUMillis},
		{"MB of memory", (memory + bytesPerMB - 1) / bytesPerMB, s.MemoryMB},
		{"accelerators", accelerators, s.Accelerators},
	} {
		if bound.max > 0 && bound.asks > bound.max {
			return fmt.Sprintf("The owner of this node accepts workloads of at most %d %s; this one asks for %d.", bound.max,
				bound.what, bound.asks)
		}
	}
	return ""
}
