// One Temporal server in one process on the loopback device, for tests of what only newer servers do than that of the
// newest Temporal CLI which can be installed from the Go module proxy. Its words are those of `temporal server start-dev`.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log"
	"maps"
	"net"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"go.temporal.io/server/common/authorization"
	"go.temporal.io/server/common/cluster"
	"go.temporal.io/server/common/config"
	"go.temporal.io/server/common/dynamicconfig"
	serverlog "go.temporal.io/server/common/log"
	"go.temporal.io/server/common/membership/static"
	"go.temporal.io/server/common/persistence/sql/sqlplugin/sqlite"
	"go.temporal.io/server/common/primitives"
	schema "go.temporal.io/server/schema/sqlite"
	"go.temporal.io/server/temporal"
)

const (
	loopback  = "127.0.0.1"
	namespace = "default"
	clusterID = "active"
	store     = "sqlite"
)

var services = []primitives.ServiceName{
	primitives.FrontendService, primitives.HistoryService, primitives.MatchingService, primitives.WorkerService,
}

func main() {
	log.SetFlags(0)
	port := flag.Int("port", 7233, "where clients connect")
	file := flag.String("db-filename", "", "where the data stays")
	pragmas := words{}
	flag.Var(pragmas, "sqlite-pragma", "name=value, set on the database; may be repeated")
	settings := dynamicSettings{
		// Search attributes are seen as soon as they are added, and the server does not hold itself back for that.
		"system.forceSearchAttributesCacheRefreshOnRead": true,
		"frontend.persistenceMaxQPS":                     10_000,
		"history.persistenceMaxQPS":                      45_000,
		"frontend.namespaceRPS.visibility":               100,
		// The server sends the requests of Nexus, and what comes of them, to its own HTTP port.
		"component.nexusoperations.useSystemCallbackURL": true,
	}
	flag.Var(settings, "dynamic-config-value", "key=JSON; may be repeated")
	flag.Parse()
	if err := serve(*port, *file, pragmas, settings); err != nil {
		log.Fatal(err)
	}
}

func serve(port int, file string, pragmas words, settings dynamicSettings) error {
	database, err := prepared(file, pragmas)
	if err != nil {
		return fmt.Errorf("no database: %w", err)
	}
	setup, hosts, err := configuration(port, database)
	if err != nil {
		return fmt.Errorf("no ports: %w", err)
	}
	logger := serverlog.NewZapLogger(serverlog.BuildZapLogger(serverlog.Config{Stdout: true, Level: "error"}))
	server, err := temporal.NewServer(
		temporal.WithConfig(setup),
		temporal.ForServices(temporal.DefaultServices),
		temporal.WithStaticHosts(hosts),
		temporal.WithLogger(logger),
		temporal.WithAuthorizer(authorization.NewNoopAuthorizer()),
		temporal.WithClaimMapper(func(*config.Config) authorization.ClaimMapper {
			return authorization.NewNoopClaimMapper()
		}),
		temporal.WithDynamicConfigClient(settings.client()),
	)
	if err != nil {
		return err
	}
	if err := server.Start(); err != nil {
		return err
	}
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, os.Interrupt, syscall.SIGTERM)
	<-stop
	return server.Stop()
}

// prepared returns the database, with the tables and the namespace in it.
func prepared(file string, pragmas words) (*config.SQL, error) {
	if file == "" {
		return nil, errors.New("--db-filename is missing")
	}
	database := &config.SQL{
		PluginName:        sqlite.PluginName,
		DatabaseName:      file,
		ConnectAttributes: map[string]string{"mode": "rwc"},
	}
	maps.Copy(database.ConnectAttributes, pragmas)
	if _, err := os.Stat(file); os.IsNotExist(err) {
		if err := schema.SetupSchema(database); err != nil {
			return nil, err
		}
	}
	wanted, err := schema.NewNamespaceConfig(clusterID, namespace, false, nil)
	if err != nil {
		return nil, err
	}
	return database, schema.CreateNamespaces(database, wanted)
}

// configuration returns what the server is told of itself, and where each of its services is.
func configuration(port int, database *config.SQL) (*config.Config, map[primitives.ServiceName]static.Hosts, error) {
	address := fmt.Sprintf("%s:%d", loopback, port)
	web, err := freePort()
	if err != nil {
		return nil, nil, err
	}
	setup := &config.Config{
		Persistence: config.Persistence{
			DefaultStore:     store,
			VisibilityStore:  store,
			NumHistoryShards: 1,
			DataStores:       map[string]config.DataStore{store: {SQL: database}},
		},
		ClusterMetadata: &cluster.Config{
			FailoverVersionIncrement: 10,
			MasterClusterName:        clusterID,
			CurrentClusterName:       clusterID,
			ClusterInformation: map[string]cluster.ClusterInformation{
				clusterID: {
					Enabled: true, InitialFailoverVersion: 1, RPCAddress: address,
					HTTPAddress: fmt.Sprintf("%s:%d", loopback, web),
				},
			},
		},
		DCRedirectionPolicy: config.DCRedirectionPolicy{Policy: "noop"},
		PublicClient:        config.PublicClient{HostPort: address},
		Services:            map[string]config.Service{},
	}
	setup.Global.Membership = config.Membership{MaxJoinDuration: 30 * time.Second, BroadcastAddress: loopback}
	setup.Archival.History.State = "disabled"
	setup.Archival.Visibility.State = "disabled"
	setup.NamespaceDefaults.Archival.History.State = "disabled"
	setup.NamespaceDefaults.Archival.Visibility.State = "disabled"

	hosts := map[primitives.ServiceName]static.Hosts{}
	for _, service := range services {
		at := port
		if service != primitives.FrontendService {
			if at, err = freePort(); err != nil {
				return nil, nil, err
			}
		}
		listens := config.RPC{GRPCPort: at, BindOnIP: loopback}
		if service == primitives.FrontendService {
			listens.HTTPPort = web
		}
		setup.Services[string(service)] = config.Service{RPC: listens}
		hosts[service] = static.SingleLocalHost(fmt.Sprintf("%s:%d", loopback, at))
	}
	return setup, hosts, nil
}

func freePort() (int, error) {
	listener, err := net.Listen("tcp", loopback+":0")
	if err != nil {
		return 0, err
	}
	defer listener.Close()
	return listener.Addr().(*net.TCPAddr).Port, nil
}

// words are name=value, as on the command line.
type words map[string]string

func (w words) String() string { return "" }

func (w words) Set(word string) error {
	name, value, found := strings.Cut(word, "=")
	if !found {
		return fmt.Errorf("%q is no name=value", word)
	}
	w[name] = value
	return nil
}

// dynamicSettings are what the server's behaviour is set by, as words of the command line.
type dynamicSettings map[string]any

func (settings dynamicSettings) String() string { return "" }

func (settings dynamicSettings) Set(word string) error {
	key, text, found := strings.Cut(word, "=")
	var value any
	if !found {
		return fmt.Errorf("%q is no key=JSON", word)
	}
	if err := json.Unmarshal([]byte(text), &value); err != nil {
		return fmt.Errorf("the value of %q is no JSON: %w", key, err)
	}
	if number, ok := value.(float64); ok && number == float64(int(number)) {
		value = int(number)
	}
	settings[key] = value
	return nil
}

func (settings dynamicSettings) client() dynamicconfig.StaticClient {
	client := dynamicconfig.StaticClient{}
	for key, value := range settings {
		client[dynamicconfig.MakeKey(key)] = []dynamicconfig.ConstrainedValue{{Value: value}}
	}
	return client
}
