package iam

import "sync"

// maxMemo bounds the answers that are remembered for one principal: a caller that polls asks the same again and again.
const maxMemo = 16

// memo remembers what the policies have answered about one principal as it was read. It lives as long as the
// PrincipalCache remembers that principal, and has no part in how it is compared.
type memo struct {
	of Principal

	mu      sync.Mutex
	allowed map[question]bool
}

// question is all that an answer depends on beside the principal.
type question struct {
	permission       Permission
	orgID, projectID string
	on               OnInstance
}

// remembering returns p with an empty memo.
func (p Principal) remembering() Principal {
	p.memo = nil
	p.memo = &memo{of: p, allowed: map[question]bool{}}
	return p
}

// allowed is whether the policies allow it, from the memo where they were asked before.
func (p Principal) allowed(permission Permission, orgID, projectID string, on OnInstance) (bool, error) {
	if p.memo == nil || !p.memo.isAbout(p) {
		d, err := policies().decide(p, permission, orgID, projectID, on)
		return d.Allowed, err
	}
	return p.memo.answer(question{permission, orgID, projectID, on}, func() (bool, error) {
		d, err := policies().decide(p, permission, orgID, projectID, on)
		return d.Allowed, err
	})
}

// answer calls ask where the answer is not remembered. An error is not.
func (m *memo) answer(q question, ask func() (bool, error)) (bool, error) {
	m.mu.Lock()
	allowed, known := m.allowed[q]
	m.mu.Unlock()
	if known {
		return allowed, nil
	}
	allowed, err := ask()
	if err != nil {
		return false, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.allowed) >= maxMemo {
		clear(m.allowed)
	}
	m.allowed[q] = allowed
	return allowed, nil
}

// isAbout reports whether p is unchanged since it was read: a copy that was given other roles has other answers.
func (m *memo) isAbout(p Principal) bool {
	o := m.of
	return p.Type == o.Type && p.ID == o.ID && p.OrgID == o.OrgID && p.ProjectID == o.ProjectID &&
		p.AppInstanceID == o.AppInstanceID && p.PlatformAdmin == o.PlatformAdmin && p.Disabled == o.Disabled &&
		len(p.Bindings) == len(o.Bindings) && (len(p.Bindings) == 0 || &p.Bindings[0] == &o.Bindings[0])
}
