package cli

import (
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/pkg/client"
)

// showSSHKeys prints a set of SSH keys.
func (s *session) showSSHKeys(set client.SSHKeySet, err error) error {
	if err != nil {
		return err
	}
	return showList(s, set.Keys, []column[client.SSHKeyEntry]{
		{"USER", func(k client.SSHKeyEntry) string { return k.User }},
		{"FINGERPRINT", func(k client.SSHKeyEntry) string { return k.Fingerprint }},
		{"EXPIRES", func(k client.SSHKeyEntry) string { return stamp(k.ExpiresAt) }},
		{"PUBLIC KEY", func(k client.SSHKeyEntry) string { return k.PublicKey }},
	})
}

// sshKeysCommand shows and replaces the sets of SSH keys of an allocation.
func (a *app) sshKeysCommand() *cobra.Command {
	var ofApps bool
	get := a.projectAction("get ALLOCATION_ID", "SSH keys of an allocation", cobra.ExactArgs(1),
		func(ctx context.Context, s *session, project string, args []string) error {
			if ofApps {
				return s.showSSHKeys(client.Read[client.SSHKeySet](s.hub.GetAppSSHKeys(ctx, project, args[0], s.editors()...)))
			}
			return s.showSSHKeys(client.Read[client.SSHKeySet](s.hub.GetOperatorSSHKeys(ctx, project, args[0], s.editors()...)))
		})
	put := a.projectAction("set ALLOCATION_ID [USER=FILE...]", "Replace the SSH keys of an allocation",
		cobra.MinimumNArgs(1), func(ctx context.Context, s *session, project string, args []string) error {
			body, err := readSSHKeys(args[1:])
			if err != nil {
				return err
			}
			if ofApps {
				return s.showSSHKeys(client.Read[client.SSHKeySet](s.hub.PutAppSSHKeys(ctx, project, args[0], body,
					s.editors()...)))
			}
			return s.showSSHKeys(client.Read[client.SSHKeySet](s.hub.PutOperatorSSHKeys(ctx, project, args[0], body,
				s.editors()...)))
		})
	put.Long = `Replaces one set of the allocation's SSH keys and leaves the other as it is. Each key in FILE, a line of
authorized_keys without options, logs in to the account USER of the allocation's node. Without any USER=FILE the set is
empty.`
	for _, c := range []*cobra.Command{get, put} {
		c.Flags().BoolVar(&ofApps, "app", false, "the set that apps manage, not the operators'")
	}
	return group("ssh-keys", "Who logs in to the node of an allocation", get, put)
}

func readSSHKeys(args []string) (body client.SSHKeySetPut, err error) {
	body.Keys = []client.SSHKey{}
	for _, arg := range args {
		user, file, ok := strings.Cut(arg, "=")
		if !ok {
			return body, usage(fmt.Errorf("%q is not USER=FILE", arg))
		}
		text, err := os.ReadFile(file)
		if err != nil {
			return body, err
		}
		for line := range strings.Lines(string(text)) {
			if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
				body.Keys = append(body.Keys, client.SSHKey{User: user, PublicKey: line})
			}
		}
	}
	return body, nil
}
