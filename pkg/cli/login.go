package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/gpuaas/gpuaas/pkg/client"
)

// maxSecretBytes bounds a token or key that is read from a file or stdin.
const maxSecretBytes = 16 << 10

// loginFlags say where the hub is, and which context keeps it.
type loginFlags struct{ url, caFile, name string }

func (l *loginFlags) add(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&l.url, "url", "", "where the hub's API is")
	f.StringVar(&l.caFile, "ca-file", "", "the hub's own authority (PEM); without it the system's authorities count")
	f.StringVar(&l.name, "name", "", "name of the context (default: the host's name)")
}

// context returns a context without a credential, and its name.
func (l *loginFlags) context(a *app) (hubContext, string, error) {
	if l.url == "" {
		return hubContext{}, "", usage(errors.New("--url is missing: where is the hub?"))
	}
	fresh := hubContext{URL: strings.TrimSuffix(l.url, "/"), Project: a.project}
	if l.caFile != "" {
		var err error
		if fresh.CAPEM, err = readAuthority(l.caFile); err != nil {
			return hubContext{}, "", usage(err)
		}
	}
	return fresh, or(l.name, defaultName(l.url)), nil
}

func (a *app) loginCommand() *cobra.Command {
	var at loginFlags
	var tokenFile, accountFile, email string
	var browser bool
	c := &cobra.Command{
		Use:   "login --url https://HOST:PORT",
		Short: "Check a credential and keep it as a context",
		Long: `Check a credential with the hub and keep it as a context, which becomes the current one.

With --email, the password is asked for, or is the first line of stdin; a one-time code is the second.
With --browser, the hub's identity provider asks who you are. A login ends after 24 hours without a
command, and after 7 days.

Otherwise the token comes from --token-file, or from stdin ("-" or a pipe), or is asked for. A program
logs in with --service-account and the file that "gpuaas sa create --save" wrote; it then mints
short-lived tokens by itself.`,
		Example: `  gpuaas login --url https://127.0.0.1:8443 --ca-file /var/lib/gpuaas-hub/ca.pem --token-file ` +
			`/var/lib/gpuaas-hub/admin-token
  gpuaas login --url https://hub.example:8443 --email ada@acme.example
  gpuaas login --url https://hub.example:8443 --service-account ci.json --name ci`,
		Args: checked(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			given := 0
			for _, flag := range []string{tokenFile, accountFile, email} {
				if flag != "" {
					given++
				}
			}
			if given > 1 || given == 1 && browser {
				return usage(errors.New("--token-file, --service-account, --email and --browser exclude each other"))
			}
			fresh, name, err := at.context(a)
			if err != nil {
				return err
			}
			ctx, cancel := a.bounded(cmd.Context())
			defer cancel()
			switch {
			case browser:
				err = a.deviceLogin(ctx, &fresh)
			case email != "":
				err = a.passwordLogin(ctx, &fresh, email)
			default:
				err = a.readCredential(&fresh, tokenFile, accountFile)
			}
			if err != nil {
				return err
			}
			return a.login(ctx, name, fresh)
		},
	}
	at.add(c)
	f := c.Flags()
	f.StringVar(&tokenFile, "token-file", "", "file with the token; - for stdin")
	f.StringVar(&accountFile, "service-account", "", "file that gpuaas sa create --save wrote")
	f.StringVar(&email, "email", "", "your e-mail address, to log in with a password")
	f.BoolVar(&browser, "browser", false, "log in with the hub's identity provider, in a browser on any device")
	return c
}

func (a *app) login(ctx context.Context, name string, fresh hubContext) error {
	p := newProgress(a.env.Stderr, a.env.StderrIsTerminal, "asking the hub who you are")
	defer p.stop()
	conf := client.Config{URL: fresh.URL, CAPEM: []byte(fresh.CAPEM), UserAgent: "gpuaas/" + a.env.Version}
	credential, err := fresh.credential(conf)
	if err != nil {
		return usage(err)
	}
	conf.Credential = credential
	hub, err := client.Open(conf)
	if err != nil {
		return usage(err)
	}
	defer hub.Close()
	who, err := client.Read[client.Whoami](hub.Whoami(ctx))
	if err != nil {
		return err
	}
	if err := changeStore(a.storePath(), func(s *store) error {
		s.Contexts[name], s.CurrentContext = fresh, name
		return nil
	}); err != nil {
		return err
	}
	p.stop()
	fmt.Fprintf(a.env.Stdout, "Logged in to %s as %s %s; context %s.\n", fresh.URL, who.Type, printable(callerName(who)),
		name)
	return nil
}

func callerName(who client.Whoami) string {
	if who.DisplayName != "" {
		return who.DisplayName
	}
	return who.ID
}

func (a *app) readCredential(c *hubContext, tokenFile, accountFile string) error {
	if accountFile != "" {
		account, err := readServiceAccount(accountFile)
		c.ServiceAccount = account
		return err
	}
	var (
		token string
		err   error
	)
	switch {
	case tokenFile != "" && tokenFile != "-":
		token, err = readSecretFile(tokenFile)
	case tokenFile == "" && a.env.ReadSecret != nil:
		token, err = a.env.ReadSecret("Token: ")
	default:
		var text []byte
		text, err = io.ReadAll(io.LimitReader(a.env.Stdin, maxSecretBytes))
		token = string(text)
	}
	if err != nil {
		return usage(err)
	}
	if c.Token = strings.TrimSpace(token); c.Token == "" {
		return usage(errors.New("no token: give --token-file FILE, or pipe it in"))
	}
	return nil
}

func readSecretFile(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }()
	text, err := io.ReadAll(io.LimitReader(f, maxSecretBytes))
	return string(text), err
}

// readServiceAccount takes the answer of the account's creation, as JSON.
func readServiceAccount(path string) (*serviceAccount, error) {
	text, err := readSecretFile(path)
	if err != nil {
		return nil, usage(err)
	}
	made, err := client.ParseServiceAccount([]byte(text))
	if err != nil {
		return nil, usage(fmt.Errorf("%s is %w", path, err))
	}
	return &serviceAccount{ID: made.ID, KeyID: made.Key.KeyID, PrivateKeyPEM: made.Key.PrivateKeyPem}, nil
}

func defaultName(hubURL string) string {
	if u, err := url.Parse(hubURL); err == nil && u.Hostname() != "" {
		return u.Hostname()
	}
	return "hub"
}

func (a *app) contextCommand() *cobra.Command {
	list := &cobra.Command{
		Use: "list", Short: "Hubs that are logged in to", Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error {
			s, err := loadStore(a.storePath())
			if err != nil {
				return err
			}
			type row struct {
				Name    string `json:"name"`
				URL     string `json:"url"`
				As      string `json:"as"`
				Project string `json:"project,omitempty"`
				Current bool   `json:"current"`
			}
			rows := []row{}
			for _, name := range s.names() {
				c := s.Contexts[name]
				as := "token"
				if c.Login != nil {
					as = "login"
				}
				if c.ServiceAccount != nil {
					as = "service_account " + c.ServiceAccount.ID
				}
				rows = append(rows, row{Name: name, URL: c.URL, As: as, Project: c.Project, Current: name == s.CurrentContext})
			}
			if a.output != "table" {
				return encode(a.env.Stdout, a.output, map[string]any{"items": rows})
			}
			return table(a.env.Stdout, rows, []column[row]{
				{"CURRENT", func(r row) string { return map[bool]string{true: "*"}[r.Current] }},
				{"NAME", func(r row) string { return r.Name }},
				{"URL", func(r row) string { return r.URL }},
				{"AS", func(r row) string { return r.As }},
				{"PROJECT", func(r row) string { return r.Project }},
			})
		},
	}
	change := func(use, short string, f func(s *store, name string)) *cobra.Command {
		return &cobra.Command{
			Use: use + " NAME", Short: short, ValidArgsFunction: a.completeContexts,
			Args: checked(cobra.ExactArgs(1)),
			RunE: func(_ *cobra.Command, args []string) error {
				return changeStore(a.storePath(), func(s *store) error {
					if _, ok := s.Contexts[args[0]]; !ok {
						return usage(fmt.Errorf("there is no context %q; gpuaas context list shows them", args[0]))
					}
					f(s, args[0])
					return nil
				})
			},
		}
	}
	return group("context", "Hubs and who one is there", list,
		change("use", "Make a context the current one", func(s *store, name string) {
			s.CurrentContext = name
			if a.project != "" {
				c := s.Contexts[name]
				c.Project = a.project
				s.Contexts[name] = c
			}
		}),
		change("remove", "Forget a context and its credential", func(s *store, name string) {
			delete(s.Contexts, name)
			if s.CurrentContext == name {
				s.CurrentContext = ""
			}
		}))
}

func (a *app) completeContexts(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
	s, err := loadStore(a.storePath())
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	return s.names(), cobra.ShellCompDirectiveNoFileComp
}

func (a *app) whoamiCommand() *cobra.Command {
	return a.action("whoami", "Who the current credential stands for", cobra.NoArgs, func(ctx context.Context, s *session,
		_ []string,
	) error {
		who, err := client.Read[client.Whoami](s.hub.Whoami(ctx, s.editors()...))
		if err != nil {
			return err
		}
		return show(s, who, []column[client.Whoami]{
			{"TYPE", func(w client.Whoami) string { return string(w.Type) }},
			{"NAME", func(w client.Whoami) string { return w.DisplayName }},
			{"ID", func(w client.Whoami) string { return w.ID }},
			{"ORG", func(w client.Whoami) string { return w.OrgID }},
			{"PROJECT", func(w client.Whoami) string { return w.ProjectID }},
			{"PLATFORM ADMIN", func(w client.Whoami) string { return fmt.Sprint(w.PlatformAdmin) }},
		})
	})
}
