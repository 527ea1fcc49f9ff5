package network

import (
	"errors"
	"slices"

	"github.com/google/nftables/expr"
)

// RefuseRules plays a kernel that has no limit on connections, or no timeouts of flows.
func (n *Network) RefuseRules(connectionLimits, timeouts bool) {
	n.commit = func(want ruleset, o openings) error {
		for _, c := range want.chains {
			if timeouts && slices.ContainsFunc(c.allRules(), uses[*expr.Objref]) ||
				connectionLimits && slices.ContainsFunc(c.rules, limitsConnections) {
				return errors.New("not supported")
			}
		}
		return n.replaceTable(want, o)
	}
}

func uses[E expr.Any](r rule) bool {
	return slices.ContainsFunc(r, func(e expr.Any) bool { _, ok := e.(E); return ok })
}

func limitsConnections(r rule) bool {
	return slices.ContainsFunc(r, func(e expr.Any) bool {
		set, ok := e.(*expr.Dynset)
		return ok && uses[*expr.Connlimit](set.Exprs)
	})
}

// WriteJSON replaces a file of this package in one step.
func WriteJSON(path string, content any) error { return writeJSON(path, content) }

// Unreserved is what a start reports whose port could not be bound.
func Unreserved(port uint16, cause error) error { return unreserved(port, cause) }
