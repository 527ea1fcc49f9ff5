package cli

import (
	"context"
	"net/http"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/pkg/client"
)

// membersCommand changes the members of an app instance that an external worker operates.
func (a *app) membersCommand() *cobra.Command {
	var body client.MemberAdd
	add := a.instanceAction("add", "Add a member with an allocation of its own", func(ctx context.Context, s *session,
		project, id string,
	) error {
		return showAnswer(s, instanceColumns())(s.hub.AddAppInstanceMember(ctx, project, id, body, s.editors()...))
	})
	add.Flags().StringVar(&body.AllocationID, "allocation", "", "id of the allocation")
	add.Flags().StringVar((*string)(&body.Role), "role", "", "component of the version (default: the last one)")
	_ = add.MarkFlagRequired("allocation")
	return group("members", "Members of an app instance that an external worker operates", add,
		a.memberAction("remove", "Take a member out, and free its allocation",
			func(ctx context.Context, s *session, project, instance, member string) (*http.Response, error) {
				return s.hub.RemoveAppInstanceMember(ctx, project, instance, member, s.editors()...)
			}),
		a.memberAction("recover", "Bring a member back that failed or is degraded",
			func(ctx context.Context, s *session, project, instance, member string) (*http.Response, error) {
				return s.hub.RecoverAppInstanceMember(ctx, project, instance, member, s.editors()...)
			}))
}

// memberAction is a leaf about one member of an app instance.
func (a *app) memberAction(verb, short string, ask func(ctx context.Context, s *session, project, instance,
	member string) (*http.Response, error),
) *cobra.Command {
	return a.projectAction(verb+" INSTANCE MEMBER", short, cobra.ExactArgs(2), func(ctx context.Context, s *session,
		project string, args []string,
	) error {
		id, err := s.instanceID(ctx, project, args[0])
		if err != nil {
			return err
		}
		return showAnswer(s, instanceColumns())(ask(ctx, s, project, id, args[1]))
	})
}
