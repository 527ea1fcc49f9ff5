package network

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// tableName is the name of this agent's own firewall table.
func (n *Network) tableName() string {
	return "gpuaas_" + strings.NewReplacer("-", "_", ".", "_").Replace(n.cfg.Bridge)
}

func (n *Network) table() *nftables.Table {
	return &nftables.Table{Family: nftables.TableFamilyINet, Name: n.tableName()}
}

// replaceTable replaces the table with the rules, the published ports and the peers in one transaction, so that members
// are isolated at any time. The rules with port ranges follow.
func (n *Network) replaceTable(want ruleset, o openings) error {
	kernel, err := nftables.New()
	if err != nil {
		return err
	}
	table := n.table()
	kernel.DelTable(kernel.AddTable(table))
	kernel.AddTable(table)
	if err := n.addSets(kernel, want); err != nil {
		return err
	}
	if want.features.timeouts {
		addFlowTimeouts(kernel, table)
	}
	for _, c := range want.chains {
		kernel.AddChain(c.in(table))
	}
	for _, c := range want.chains {
		for _, r := range c.rules {
			kernel.AddRule(&nftables.Rule{Table: table, Chain: c.in(table), Exprs: r})
		}
	}
	if err := n.addOpenings(kernel, o); err != nil {
		return err
	}
	if err := kernel.Flush(); err != nil {
		return err
	}
	for _, c := range want.chains {
		if err := insertRangeRules(c.in(table), c.rangeRules); err != nil {
			return err
		}
	}
	return nil
}

// addSets adds the sets that rules refer to, the maps of published ports, and the set of peers.
func (n *Network) addSets(kernel *nftables.Conn, want ruleset) error {
	var errs []error
	for _, s := range want.sets {
		errs = append(errs, kernel.AddSet(&nftables.Set{
			Table: n.table(), Name: s.name, KeyType: s.key, Interval: s.interval, Constant: true,
		}, s.elements))
	}
	if want.features.limits {
		for _, name := range []string{newFlowSet, openFlowSet} {
			set := n.flowSet(name)
			set.Dynamic, set.Size = true, want.flowSetSize
			errs = append(errs, kernel.AddSet(set, nil))
		}
	}
	for _, p := range protocols() {
		errs = append(errs, kernel.AddSet(n.portSet(p), nil))
	}
	errs = append(errs, kernel.AddSet(n.peerSet(), nil))
	return errors.Join(errs...)
}

// in is the chain as the table's.
func (c ruleChain) in(table *nftables.Table) *nftables.Chain {
	chain := &nftables.Chain{Table: table, Name: c.name}
	if b := c.base; b.kind != "" {
		accept := nftables.ChainPolicyAccept
		chain.Type, chain.Hooknum, chain.Priority, chain.Policy = b.kind, &b.hook, &b.priority, &accept
	}
	return chain
}

// removeTable removes the firewall table if it is there.
func (n *Network) removeTable() error {
	kernel, err := nftables.New()
	if err != nil {
		return err
	}
	kernel.DelTable(kernel.AddTable(n.table()))
	if err := kernel.Flush(); err != nil {
		return fmt.Errorf("remove the firewall table: %w", err)
	}
	return nil
}

// difference says in what the kernel's table differs from the rules, the published ports and the peers; "" where it
// does not. The timeouts of flows are not compared: the kernel changes no such object while a rule uses it.
func (n *Network) difference(want ruleset, o openings) (string, error) {
	kernel, err := nftables.New(nftables.AsLasting())
	if err != nil {
		return "", err
	}
	defer func() { _ = kernel.CloseLasting() }()
	for _, compare := range []func() (string, error){
		func() (string, error) { return n.chainDifference(kernel, want) },
		func() (string, error) { return n.ruleDifference(kernel, want) },
		func() (string, error) { return n.setDifference(kernel, want) },
		func() (string, error) { return n.portDifference(kernel, o.ports) },
		func() (string, error) { return n.peerDifference(o.peers) },
	} {
		found, err := compare()
		if isMissing(err) {
			return "something is missing: " + err.Error(), nil
		}
		if err != nil || found != "" {
			return found, err
		}
	}
	return "", nil
}

// isMissing reports whether the kernel has no such object. The library passes on the kernel's text, not its number.
func isMissing(err error) bool {
	return err != nil && strings.Contains(err.Error(), unix.ENOENT.Error())
}

func (n *Network) chainDifference(kernel *nftables.Conn, want ruleset) (string, error) {
	tables, err := kernel.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return "", err
	}
	i := slices.IndexFunc(tables, func(t *nftables.Table) bool { return t.Name == n.tableName() })
	if i < 0 {
		return "there is no table", nil
	}
	if tables[i].Flags != 0 { // one of them is "dormant"
		return "the table has other flags", nil
	}
	all, err := kernel.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		return "", err
	}
	count := 0
	for _, c := range all {
		if c.Table.Name != n.tableName() {
			continue
		}
		count++
		if !slices.ContainsFunc(want.chains, func(w ruleChain) bool { return sameChain(w.in(c.Table), c) }) {
			return "chain " + c.Name + " is another", nil
		}
	}
	if count != len(want.chains) {
		return "a chain is missing", nil
	}
	return "", nil
}

func sameChain(a, b *nftables.Chain) bool {
	return a.Name == b.Name && a.Type == b.Type && same(a.Hooknum, b.Hooknum) && same(a.Priority, b.Priority) &&
		same(a.Policy, b.Policy)
}

func same[T comparable](a, b *T) bool { return a == b || a != nil && b != nil && *a == *b }

func (n *Network) ruleDifference(kernel *nftables.Conn, want ruleset) (string, error) {
	for _, c := range want.chains {
		rules, err := kernel.GetRules(n.table(), c.in(n.table()))
		if err != nil {
			return "", err
		}
		want := c.allRules()
		if len(rules) != len(want) {
			return fmt.Sprintf("chain %s has %d rules", c.name, len(rules)), nil
		}
		for i, r := range rules {
			if !sameRule(want[i], r.Exprs) {
				return fmt.Sprintf("rule %d of chain %s is another", i, c.name), nil
			}
		}
	}
	return "", nil
}

// sameRule compares rules as they are sent to the kernel.
func sameRule(a, b rule) bool {
	return slices.EqualFunc(a, b, func(x, y expr.Any) bool {
		one, err1 := expr.Marshal(unix.NFPROTO_INET, x)
		other, err2 := expr.Marshal(unix.NFPROTO_INET, y)
		return err1 == nil && err2 == nil && bytes.Equal(one, other)
	})
}

func (n *Network) setDifference(kernel *nftables.Conn, want ruleset) (string, error) {
	for _, s := range want.sets {
		elements, err := kernel.GetSetElements(&nftables.Set{Table: n.table(), Name: s.name})
		if err != nil {
			return "", err
		}
		if !slices.Equal(sortedKeys(elements), sortedKeys(s.elements)) {
			return "set " + s.name + " is another", nil
		}
	}
	return "", nil
}

// sortedKeys are the elements as text; the kernel lists them in any order.
func sortedKeys(elements []nftables.SetElement) []string {
	keys := make([]string, 0, len(elements))
	for _, e := range elements {
		keys = append(keys, fmt.Sprintf("%x %t", e.Key, e.IntervalEnd))
	}
	slices.Sort(keys)
	return keys
}
