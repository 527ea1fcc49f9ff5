package iam

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/principal"
)

func TestARememberedAnswerIsThatOfThePolicies(t *testing.T) {
	for _, p := range principals() {
		kept := p.remembering()
		for range 2 {
			for _, permission := range append(Permissions(), "made.up") {
				for _, at := range resources() {
					want := Authorize(p, permission, at.org, at.project)
					require.Equal(t, want, Authorize(kept, permission, at.org, at.project), "%+v %s %+v", p, permission, at)
					require.Equal(t, want, Authorize(kept, permission, at.org, at.project), "%+v %s %+v, again", p, permission, at)
				}
			}
			for _, on := range []OnInstance{{ID: "i"}, {OperatingMode: "platform_managed"}, {Attached: true}} {
				require.Equal(t, AuthorizeOperation(p, InstanceStop, "acme", "p1", on),
					AuthorizeOperation(kept, InstanceStop, "acme", "p1", on), "%+v %+v", p, on)
			}
		}
		require.LessOrEqual(t, len(kept.memo.allowed), maxMemo)
	}
}

func TestWhatIsRememberedIsNotAskedAgain(t *testing.T) {
	m := Principal{}.remembering().memo
	asked := 0
	ask := func(allowed bool, err error) func() (bool, error) {
		return func() (bool, error) { asked++; return allowed, err }
	}
	failed := errors.New("a policy cannot be evaluated")
	allowed, err := m.answer(question{permission: InstanceRead}, ask(true, failed))
	require.ErrorIs(t, err, failed)
	require.False(t, allowed)
	for range 3 {
		allowed, err = m.answer(question{permission: InstanceRead}, ask(true, nil))
		require.NoError(t, err)
		require.True(t, allowed)
	}
	require.Equal(t, 2, asked, "the failure was not remembered, the answer was")
	for i := range 10 * maxMemo {
		_, err = m.answer(question{permission: InstanceRead, projectID: fmt.Sprint(i)}, ask(false, nil))
		require.NoError(t, err)
	}
	require.LessOrEqual(t, len(m.allowed), maxMemo)
}

// A memo is of a principal as it was read: no change of a copy gets its answers.
func TestAChangedPrincipalHasAnswersOfItsOwn(t *testing.T) {
	p := Principal{
		Type: principal.User, ID: "u", OrgID: "acme", Bindings: []Binding{{Role: ProjectAdmin, ProjectID: "p1"}},
	}.remembering()
	require.NoError(t, Authorize(p, InstanceRead, "acme", "p1"))
	for name, change := range map[string]func(*Principal){
		"disabled":      func(p *Principal) { p.Disabled = true },
		"no roles":      func(p *Principal) { p.Bindings = nil },
		"fewer roles":   func(p *Principal) { p.Bindings = p.Bindings[:0] },
		"other roles":   func(p *Principal) { p.Bindings = []Binding{{Role: ProjectAdmin, ProjectID: "p2"}} },
		"other org":     func(p *Principal) { p.OrgID = "other" },
		"no id":         func(p *Principal) { p.ID = "" },
		"an app's only": func(p *Principal) { p.Type, p.AppInstanceID, p.Bindings = principal.ServiceAccount, "i", nil },
	} {
		changed := p
		change(&changed)
		require.Error(t, Authorize(changed, InstanceRead, "acme", "p1"), name)
	}
	admin := p
	admin.PlatformAdmin = true
	require.Error(t, Authorize(p, NodeWrite, "", ""))
	require.NoError(t, Authorize(admin, NodeWrite, "", ""))
}
