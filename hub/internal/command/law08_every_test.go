package command_test

import (
	"maps"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/command"
)

// broken are the commands whose transaction a test of law 8 has broken, by the name of their method.
var broken sync.Map

// noteCommands notes the methods of command.Service that wait for the transaction around the caller.
func noteCommands() {
	const method = "/hub/internal/command.(*Service)."
	stack := make([]uintptr, 100)
	frames := runtime.CallersFrames(stack[:runtime.Callers(1, stack)])
	for {
		frame, more := frames.Next()
		if _, after, is := strings.Cut(frame.Function, method); is {
			name, _, _ := strings.Cut(after, ".")
			broken.Store(name, true)
		}
		if !more {
			return
		}
	}
}

// withoutChange are the methods that have no transaction that changes anything, or that only tests have.
func withoutChange() []string {
	return []string{"CreateAllocationOn", "MeetPrecondition", "WithAround", "WithMinVersion"}
}

// law08 are the tables of changes by their names: all commands are in them.
func law08() map[string]func(t *testing.T) {
	return map[string]func(t *testing.T){
		"ActionsAreOneTransaction":                          law08ActionsAreOneTransaction,
		"AnIdentityIsIssuedRenewedAndEndedInOneTransaction": law08AnIdentityIsIssuedRenewedAndEndedInOneTransaction,
		"CallsOfExternalWorkersAreOneTransaction":           law08CallsOfExternalWorkersAreOneTransaction,
		"ChangesOfAccessCredentialsAreOneTransaction":       law08ChangesOfAccessCredentialsAreOneTransaction,
		"ChangesOfAttachmentsAreOneTransaction":             law08ChangesOfAttachmentsAreOneTransaction,
		"ChangesOfMembersAreOneTransaction":                 law08ChangesOfMembersAreOneTransaction,
		"ChangesOfSecretsAreOneTransaction":                 law08ChangesOfSecretsAreOneTransaction,
		"ChangesOfVolumesAreOneTransaction":                 law08ChangesOfVolumesAreOneTransaction,
		"CredentialsAreOneTransaction":                      law08CredentialsAreOneTransaction,
		"DataEventAndAuditAreOneTransaction":                law08DataEventAndAuditAreOneTransaction,
		"FleetCommandsAreOneTransaction":                    law08FleetCommandsAreOneTransaction,
		"PeopleCommandsAreOneTransaction":                   law08PeopleCommandsAreOneTransaction,
		"ReplacingSSHKeysIsOneTransaction":                  law08ReplacingSSHKeysIsOneTransaction,
		"SessionCommandsAreOneTransaction":                  law08SessionCommandsAreOneTransaction,
		"WebhookCommandsAreOneTransaction":                  law08WebhookCommandsAreOneTransaction,
		"OtherCommands":                                     law08OtherCommands,
		"Logins":                                            law08Logins,
		"ExternalLogins":                                    law08ExternalLogins,
		"Publishing":                                        law08Publishing,
	}
}

// TestLaw08EveryCommandIsOneTransaction breaks every statement of every command, and finds the commands by reflection:
// one that no table has fails the test.
func TestLaw08EveryCommandIsOneTransaction(t *testing.T) {
	all := law08()
	ran := 0
	for _, name := range slices.Sorted(maps.Keys(all)) {
		t.Run(name, func(t *testing.T) {
			ran++
			all[name](t)
		})
	}
	if ran < len(all) {
		return // go test was asked for some of them
	}
	service := reflect.TypeFor[*command.Service]()
	for method := range service.Methods() {
		_, was := broken.Load(method.Name)
		require.NotEqual(t, was, slices.Contains(withoutChange(), method.Name), "%s: broken is %t", method.Name, was)
	}
}
