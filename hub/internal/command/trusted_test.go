package command_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/artifact"
	"github.com/gpuaas/gpuaas/hub/internal/command"
	"github.com/gpuaas/gpuaas/hub/internal/instance"
	"github.com/gpuaas/gpuaas/pkg/fault"
	"github.com/gpuaas/gpuaas/protocol"
)

// Law 1: nothing that starts containers does so with an image whose trust has ended since its version became active.
func TestLaw01NoActionRunsAnImageThatIsNoLongerTrusted(t *testing.T) {
	for name, arrange := range map[string]func(w *world) func(*command.Service) (instance.Instance, error){
		"create": func(w *world) func(*command.Service) (instance.Instance, error) {
			w.Allocation()
			return func(s *command.Service) (instance.Instance, error) {
				return s.CreateInstance(w.T.Context(), w.Meta("create"), w.InstanceInput())
			}
		},
		"upgrade": func(w *world) func(*command.Service) (instance.Instance, error) {
			i := w.Running()
			w.Release("2.0.0")
			return func(s *command.Service) (instance.Instance, error) {
				return s.UpgradeInstance(w.T.Context(), w.Meta("upgrade"), command.UpgradeInstanceInput{
					ProjectID: w.Project.ID, InstanceID: i.ID, Version: "2.0.0",
				})
			}
		},
		"rollback": func(w *world) func(*command.Service) (instance.Instance, error) {
			i := w.Upgraded()
			ready := w.Says(i, protocol.WorkloadStatus_READY)
			ready.Revision = 2
			w.Report(2, ready)
			return func(s *command.Service) (instance.Instance, error) {
				return s.RollbackInstance(w.T.Context(), w.Meta("rollback"), w.Project.ID, i.ID, "")
			}
		},
		"start": func(w *world) func(*command.Service) (instance.Instance, error) {
			i := w.Stopped()
			return func(s *command.Service) (instance.Instance, error) {
				return s.StartInstance(w.T.Context(), w.Meta("start"), w.Project.ID, i.ID)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			act := arrange(w)
			w.Exec(`UPDATE artifacts SET trust_state = 'revoked'`)
			before := w.Contents()
			_, err := act(w.Commands())
			require.Equal(t, artifact.CodeNotVerified, fault.As(err).Code, "%v", err)
			require.Equal(t, before, w.Contents())
			w.Exec(`UPDATE artifacts SET trust_state = 'verified'`)
			_, err = act(w.Commands())
			require.NoError(t, err)
		})
	}
}
