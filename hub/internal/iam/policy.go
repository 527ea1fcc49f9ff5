package iam

import (
	_ "embed"
	"errors"
	"fmt"
	"iter"
	"slices"
	"sort"
	"strings"
	"sync"

	"github.com/cedar-policy/cedar-go"

	"github.com/gpuaas/gpuaas/hub/internal/principal"
)

//go:embed policies.cedar
var policyDocument []byte

// Rule names a policy of policies.cedar.
type Rule struct {
	ID, Description string
}

// Decision is the answer of the policies.
type Decision struct {
	Allowed bool
	// Rules are those that allowed or forbade it, in the order of policies.cedar; none where no policy permits it.
	Rules []Rule
}

// Decide asks the policies whether p may do permission to a resource of orgID and projectID. Both empty means a
// resource of the platform (catalogue, nodes, prices); projectID empty means one of the org as a whole. A policy that
// cannot be evaluated is an error, and nothing is allowed then.
func Decide(p Principal, permission Permission, orgID, projectID string) (Decision, error) {
	return policies().decide(p, permission, orgID, projectID, OnInstance{})
}

// Know is the action of the policy that says whether a principal may know that a resource exists. It is no permission
// that a role has.
const Know Permission = "know"

// IDs of policies that explanations give a reason of their own.
const (
	tenantBoundary  = "tenant_boundary"
	disabledRule    = "disabled"
	platformManaged = "platform_managed"
	attachedRule    = "attached"
)

// Entities of the policies.
const (
	platformType cedar.EntityType = "Platform"
	orgType      cedar.EntityType = "Org"
	projectType  cedar.EntityType = "Project"
	actionType   cedar.EntityType = "Action"
)

// policySet is in the order of policies.cedar.
type policySet []policy

type policy struct {
	Rule
	*cedar.Policy
}

//nolint:gochecknoglobals // a constant that has to be compiled; the embedded document cannot fail to compile (tested)
var policies = sync.OnceValue(func() policySet {
	set, err := parsePolicies(policyDocument)
	if err != nil {
		panic(err)
	}
	return set
})

func parsePolicies(text []byte) (policySet, error) {
	list, err := cedar.NewPolicyListFromBytes("policies.cedar", text)
	if err != nil {
		return nil, err
	}
	var set policySet
	for _, p := range list {
		set = append(set, policy{
			Rule:   Rule{ID: string(p.Annotations()["id"]), Description: string(p.Annotations()["description"])},
			Policy: p,
		})
	}
	return set, nil
}

// All makes the set a cedar.PolicyIterator.
func (s policySet) All() iter.Seq2[cedar.PolicyID, *cedar.Policy] {
	return func(yield func(cedar.PolicyID, *cedar.Policy) bool) {
		for _, p := range s {
			if !yield(cedar.PolicyID(p.ID), p.Policy) {
				return
			}
		}
	}
}

// OnInstance is what the policies know of the app instance that something is done to; the zero value is none.
type OnInstance struct {
	ID            string
	OperatingMode string
	// Attached: it belongs to another project, and the project in question is attached to it.
	Attached bool
}

func (s policySet) decide(p Principal, permission Permission, orgID, projectID string, on OnInstance) (Decision,
	error,
) {
	kind := principalType(p.Type)
	if p.ID == "" || kind == "" {
		return Decision{}, nil
	}
	subject := cedar.Entity{UID: cedar.NewEntityUID(kind, cedar.String(p.ID))}
	object := cedar.Entity{UID: cedar.NewEntityUID(platformType, "platform")}
	var scopes []cedar.EntityUID
	subject.Attributes, scopes = p.attributes(permission, orgID == "" && projectID == "", projectID)
	switch {
	case projectID != "":
		object.UID = cedar.NewEntityUID(projectType, cedar.String(projectID))
		if orgID != "" {
			object.Parents = cedar.NewEntityUIDSet(orgUID(orgID))
		}
	case orgID != "":
		object.UID = orgUID(orgID)
	default:
		object.Parents = cedar.NewEntityUIDSet(scopes...)
	}
	answer, why := cedar.Authorize(s, cedar.EntityMap{subject.UID: subject, object.UID: object}, cedar.Request{
		Principal: subject.UID,
		Action:    cedar.NewEntityUID(actionType, cedar.String(permission)),
		Resource:  object.UID,
		Context: cedar.NewRecord(cedar.RecordMap{
			"app_instance": cedar.String(on.ID), "operating_mode": cedar.String(on.OperatingMode),
			"attached": cedar.Boolean(on.Attached),
		}),
	})
	var errs []error
	for _, e := range why.Errors {
		errs = append(errs, fmt.Errorf("evaluate policy %s: %s", e.PolicyID, e.Message))
	}
	if len(errs) > 0 {
		return Decision{}, errors.Join(errs...)
	}
	out := Decision{Allowed: answer == cedar.Allow}
	for _, reason := range why.Reasons {
		i := slices.IndexFunc(s, func(p policy) bool { return p.ID == string(reason.PolicyID) })
		out.Rules = append(out.Rules, s[i].Rule)
	}
	return out, nil
}

// attributes returns what the policies read of p, with the scopes of all its roles. Of the bindings only those that can
// count for the resource are in it: the org-wide ones and those of the project, or one of each role where the resource
// is the platform's. Bindings are sorted, so that their number does not matter.
func (p Principal) attributes(permission Permission, platform bool,
	projectID string,
) (cedar.Record, []cedar.EntityUID) {
	held := map[Role][]cedar.Value{}
	var custom []cedar.Value
	var scopes []cedar.EntityUID
	add := func(b Binding) {
		scope := orgUID(p.OrgID)
		if b.ProjectID != "" {
			scope = cedar.NewEntityUID(projectType, cedar.String(b.ProjectID))
		}
		held[b.Role], scopes = append(held[b.Role], scope), append(scopes, scope)
		if slices.Contains(b.Permissions, permission) {
			custom = append(custom, scope)
		}
	}
	for of := range bindingsByRole(p.Bindings) {
		if platform || of[0].ProjectID == "" {
			add(of[0])
		}
		if projectID == "" {
			continue
		}
		if i, found := slices.BinarySearchFunc(of, projectID, func(b Binding, id string) int {
			return strings.Compare(b.ProjectID, id)
		}); found {
			add(of[i])
		}
	}
	all := make([]cedar.Value, len(scopes))
	for i, scope := range scopes {
		all[i] = scope
	}
	attributes := cedar.RecordMap{
		"platform_admin": cedar.Boolean(p.PlatformAdmin),
		"disabled":       cedar.Boolean(p.Disabled),
		"scopes":         cedar.NewSet(all...),
		"custom_role":    cedar.NewSet(custom...),
	}
	if p.OrgID != "" {
		attributes["org"] = orgUID(p.OrgID)
	}
	if p.AppInstanceID != "" {
		attributes["app_instance"] = cedar.String(p.AppInstanceID)
	}
	for _, r := range roles() {
		attributes[cedar.String(r)] = cedar.NewSet(held[r]...)
	}
	return cedar.NewRecord(attributes), scopes
}

// bindingsByRole yields the bindings of one role after the other.
func bindingsByRole(all []Binding) iter.Seq[[]Binding] {
	return func(yield func([]Binding) bool) {
		for len(all) > 0 {
			n := sort.Search(len(all), func(i int) bool { return all[i].Role != all[0].Role })
			if !yield(all[:n]) {
				return
			}
			all = all[n:]
		}
	}
}

func orgUID(id string) cedar.EntityUID { return cedar.NewEntityUID(orgType, cedar.String(id)) }

func principalType(t principal.Type) cedar.EntityType {
	switch t {
	case principal.User:
		return "User"
	case principal.ServiceAccount:
		return "ServiceAccount"
	case principal.Node:
		return "Node"
	default:
		return ""
	}
}
