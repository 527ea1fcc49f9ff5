// Package leakcheck takes snapshots of a machine and compares them: processes, mounts, network namespaces, links,
// routes, firewall rules, sysctls, cgroups, containerd's objects and files. Tests use it to check that nothing is left
// behind. It never removes anything.
package leakcheck

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// Kind is the kind of an item.
type Kind string

// The kinds that a snapshot holds.
const (
	Process    Kind = "process"
	Mount      Kind = "mount"
	NetNS      Kind = "netns"
	Link       Kind = "link"
	Route      Kind = "route"
	Firewall   Kind = "firewall"
	Sysctl     Kind = "sysctl"
	Cgroup     Kind = "cgroup"
	Containerd Kind = "containerd"
	File       Kind = "file"
)

// Scope selects what is compared. The zero value selects the whole machine without any containerd.
type Scope struct {
	// Kinds restricts what is compared; empty means all.
	Kinds []Kind
	// ContainerdAddress is the path of a containerd socket. A socket that does not exist holds no objects; one that does
	// not answer is an error.
	ContainerdAddress string
	// NetNS are paths of further network namespaces whose links, routes, rules and sysctls count, like /run/netns/hub. One
	// that is gone holds nothing.
	NetNS []string
	// Files are the trees to walk; empty means /run, /var, /tmp and /etc.
	Files []string
	// IgnoreFiles are path prefixes that are not compared, in addition to the package's own short list.
	IgnoreFiles []string
	// IgnoreMounts are path prefixes below which mounts are not compared: directories where other programs mount.
	IgnoreMounts []string
	// Contains keeps only items whose text holds one of these; empty keeps all. For tests that share a machine with
	// others: they name everything they make with one unique word.
	Contains []string
	// Skip leaves out the items for whose identity it returns true.
	Skip func(id string) bool
	// KeepImages accepts new images, their content and committed snapshots: cached images may stay (law 9).
	KeepImages bool
}

// Snapshot maps, for each kind, an item's identity to its state.
type Snapshot struct {
	Items map[Kind]map[string]string `json:"items"`
	scope Scope
}

// Take takes a snapshot of the scope. What it cannot read is an error, so that no snapshot is incomplete. What is not
// compared is not read: others may be changing it.
func Take(scope Scope) (Snapshot, error) {
	s := Snapshot{Items: map[Kind]map[string]string{}, scope: scope}
	var errs []error
	for _, part := range []struct {
		take  func(*Snapshot) error
		kinds []Kind
	}{
		{takeProcesses, []Kind{Process}},
		{takeMounts, []Kind{Mount}},
		{takeNetNamespaces, []Kind{NetNS}},
		{takeNetwork, []Kind{Link, Route, Firewall, Sysctl}},
		{takeCgroups, []Kind{Cgroup}},
		{takeContainerd, []Kind{Containerd}},
		{takeFiles, []Kind{File}},
	} {
		if slices.ContainsFunc(part.kinds, scope.compares) {
			errs = append(errs, part.take(&s))
		}
	}
	return s, errors.Join(errs...)
}

// compares reports whether a kind is compared.
func (c Scope) compares(kind Kind) bool { return len(c.Kinds) == 0 || slices.Contains(c.Kinds, kind) }

func (s *Snapshot) add(kind Kind, id, state string) {
	if !s.scope.compares(kind) || !s.scope.covers(id, state) || s.scope.Skip != nil && s.scope.Skip(id) {
		return
	}
	if s.Items[kind] == nil {
		s.Items[kind] = map[string]string{}
	}
	s.Items[kind][id] = state
}

func (c Scope) covers(texts ...string) bool {
	if len(c.Contains) == 0 {
		return true
	}
	return slices.ContainsFunc(c.Contains, func(word string) bool {
		return slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(text, word) })
	})
}

// Diff lists the differences, sorted, one line each. Processes, network namespaces and cgroups that have ended are no
// difference.
func Diff(before, after Snapshot) []string {
	var out []string
	for _, kind := range []Kind{Process, Mount, NetNS, Link, Route, Firewall, Sysctl, Cgroup, Containerd, File} {
		was, is := before.Items[kind], after.Items[kind]
		for id, state := range is {
			old, had := was[id]
			switch {
			case !had && kind == Sysctl:
				// A new link has sysctls of its own; the link is reported.
			case !had && kind == NetNS:
				out = append(out, fmt.Sprintf("%s new: %s %s", kind, id, holders(id)))
			case !had:
				out = append(out, fmt.Sprintf("%s new: %s %s", kind, id, state))
			case old != state && kind != Process:
				out = append(out, fmt.Sprintf("%s changed: %s from %q to %q", kind, id, old, state))
			}
		}
		for id, state := range was {
			if _, has := is[id]; !has && !endsByItself(kind) {
				out = append(out, fmt.Sprintf("%s gone: %s %s", kind, id, state))
			}
		}
	}
	slices.Sort(out)
	return out
}

func endsByItself(kind Kind) bool {
	switch kind {
	case Process, NetNS, Sysctl, Cgroup:
		return true
	default:
		return false
	}
}

// settleWithin bounds how long Left waits for the kernel, which removes network namespaces and cgroups in its own time.
const settleWithin = 30 * time.Second

// Guard takes a snapshot now and one after the test's clean-ups, and fails the test if they differ. Call it first:
// clean-ups run in reverse order.
func Guard(t testing.TB, scope Scope) {
	t.Helper()
	before, err := Take(scope)
	if err != nil {
		t.Fatalf("photograph the machine before the test: %v", err)
	}
	t.Cleanup(func() {
		if left := Left(before); len(left) > 0 {
			t.Errorf("the test left %d things behind:\n  %s", len(left), strings.Join(left, "\n  "))
		}
	})
}

// Left waits until the kernel has removed what is ending, and returns the differences to the snapshot, one line each.
func Left(before Snapshot) []string {
	ctx, cancel := context.WithTimeout(context.Background(), settleWithin)
	defer cancel()
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	for {
		after, err := Take(before.scope)
		left := Diff(before, after)
		if err != nil {
			left = append(left, "cannot take a snapshot: "+err.Error())
		}
		if len(left) == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return left
		case <-tick.C:
		}
	}
}
